"""Plans are a function of what came: the parts that decide know no clock and no tensors, and choose nothing by chance."""

from __future__ import annotations

import ast
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from engine.core import Copy, Load, Save, Sequence, StepPlan
from tests.engine.test_storms import Workload

ROOT = Path(__file__).parents[2]
PURE = ("scheduler", "waiting", "alike", "room", "blocks", "prefix_cache", "tier", "cost")
STANDARD = {"__future__", "array", "bisect", "collections", "collections.abc", "dataclasses", "hashlib", "itertools", "math", "operator"}
IMPURE = {"open", "print", "input", "exec", "eval", "__import__", "id", "hash"}  # the last two differ from run to run


@pytest.mark.parametrize("name", PURE)
def test_what_decides_knows_no_clock_no_tensors_and_no_files(name: str) -> None:
    tree = ast.parse((ROOT / "engine" / f"{name}.py").read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            imported |= {f"engine.{alias.name}" for alias in node.names} if node.module == "engine" else {node.module or "."}
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert imported <= STANDARD | {"engine.core"} | {f"engine.{other}" for other in PURE}
    assert not called & IMPURE


def told(seed: int) -> str:
    """All that a workload plans, digested."""
    workload = Workload(seed)
    digest = hashlib.sha256()
    planned = workload.scheduler.plan

    def plan(arrivals: Iterable[Sequence] = (), aborts: Iterable[Sequence] = ()) -> StepPlan:
        plan = planned(arrivals, aborts)
        digest.update(repr([(chunk.sequence.id, chunk.start, chunk.tokens, chunk.sequence.table) for chunk in plan.chunks]).encode())
        for move in plan.moves:
            match move:
                case Copy(one, other) | Save(one, other, _) | Load(one, other, _):
                    digest.update(f"{type(move).__name__} {one} {other}".encode())
        return plan

    workload.scheduler.plan = plan  # type: ignore[method-assign]
    workload.run()
    return digest.hexdigest()


def test_the_same_arrivals_give_the_same_plans() -> None:
    """Here, and in processes where everything hashes differently and lies elsewhere in memory."""
    seeds = range(2000, 2012)
    here = [told(seed) for seed in seeds]
    assert [told(seed) for seed in seeds] == here
    assert len(set(here)) == len(here)
    program = f"from tests.engine.test_purity import told; print(*(told(seed) for seed in {seeds}))"
    for chance in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": chance}
        there = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
        assert there.stdout.split() == here
