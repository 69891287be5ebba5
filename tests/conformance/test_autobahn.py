"""Autobahn's cases against WebSockets as Hocket sets them up. What is not OK is listed, with the reason, in docs/autobahn.md. (slow)"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kosoku import FailureError, run_fuzzingclient

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
CATEGORIES = ("1", "2", "3", "4", "5", "6", "7", "10")
ROW = re.compile(r"^\| (?P<case>\d+(?:\.\d+)+) \| (?P<outcome>[A-Z-]+(?: or [A-Z-]+)*) \| .+ \|$", re.MULTILINE)


@pytest.fixture
def echo() -> Iterator[str]:
    command = (sys.executable, "-m", "tests.conformance.echo", "--port", "0", "--log-level", "error")
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout
    yield process.stdout.readline().split()[-1].replace("http", "ws")
    process.terminate()
    _, log = process.communicate(timeout=30)
    assert log == "", "what clients do wrong is not the server's error"


async def test_every_case_comes_out_as_the_docs_say(echo: str) -> None:
    listed = {row["case"]: row["outcome"].split(" or ") for row in ROW.finditer((ROOT / "docs" / "autobahn.md").read_text())}
    try:
        results = await run_fuzzingclient(echo, cases=[f"{category}.*" for category in CATEGORIES], concurrency=4)
    except FailureError as fault:
        results = fault.results
    outcomes = {result.case_id: result.behavior.value for result in results}
    assert {case.split(".")[0] for case in outcomes} == set(CATEGORIES) and len(outcomes) >= 247
    assert listed.keys() <= outcomes.keys()
    differing = {case: outcome for case, outcome in outcomes.items() if outcome not in listed.get(case, ["OK"])}
    assert not differing
    closes = {result.case_id: result.behavior_close.value for result in results if result.behavior_close.value != "OK"}
    assert {case for case, close in closes.items() if close != "INFORMATIONAL"} == {"7.1.5"}, closes
