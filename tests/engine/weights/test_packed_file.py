"""The packed file: made once, in a child process, mapped, and made again when it is not what it should be."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType

from engine.core import ModelError
from engine.weights import cache, child, packing
from engine.weights.checkpoint import WEIGHTS, Checkpoint
from engine.weights.convert import prepare
from engine.weights.packed import PackedModel, prepare_packed
from tests.engine import tiny


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint's folder, to copy."""
    folder = tmp_path_factory.mktemp("converted")
    # The 19 tiles of a Q8_0 table do not end at a multiple of 64 bytes.
    kinds = {"embed_tokens": GGMLQuantizationType.Q8_0}
    return prepare(str(tiny.write_gguf(folder / "m.gguf", kind=GGMLQuantizationType.Q4_1, kinds=kinds)), folder / "cache").path


@pytest.fixture
def checkpoint(converted: Path, tmp_path: Path) -> Checkpoint:
    """A checkpoint in a cache of its own, nothing packed yet."""
    (tmp_path / "cache" / "locks").mkdir(parents=True)
    return Checkpoint(Path(shutil.copytree(converted, tmp_path / "cache" / "converted" / converted.name)))


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The formats that were packed in a child process."""
    made: list[str] = []
    run = child.run

    def counted(module: str, arguments: Sequence[str], *rest: Any) -> None:
        if module == packing.__name__:
            made.append(arguments[2])
        run(module, arguments, *rest)

    monkeypatch.setattr(child, "run", counted)
    return made


def folder_of(checkpoint: Checkpoint, weights: str = "auto") -> Path:
    return checkpoint.path.with_name(f"{checkpoint.path.name}-{weights}-p{packing.PACKED_VERSION}")


def content(model: PackedModel) -> bytes:
    layers = [each.data.tobytes() for layer in model.layers for each in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    return b"".join([*layers, model.head.data.tobytes(), model.norm.tobytes()])


def test_a_format_is_packed_once(checkpoint: Checkpoint, children: list[str]) -> None:
    stages: list[str] = []
    first = prepare_packed(checkpoint, progress=lambda stage, fraction: stages.append(stage))
    second = prepare_packed(checkpoint, progress=lambda stage, fraction: stages.append(stage))
    assert stages[0] == "packing the weights"
    assert content(first) == content(second)
    prepare_packed(checkpoint, "float32")
    assert children == ["auto", "float32"]
    assert sorted(file.name for file in folder_of(checkpoint).iterdir()) == [packing.DATA, packing.MANIFEST]


def test_tensors_are_aligned_and_cannot_be_written(checkpoint: Checkpoint) -> None:
    model = prepare_packed(checkpoint)
    assert model.nbytes == (folder_of(checkpoint) / packing.DATA).stat().st_size
    layer = model.layers[1]
    for data in (layer.qkv.data, layer.out.data, layer.gate_up.data, layer.down.data, model.head.data, layer.mlp_norm, model.norm):
        assert type(data) is np.ndarray
        assert data.ctypes.data % 64 == 0
        assert not data.flags.writeable
        assert data.flags.c_contiguous


def test_opening_imports_neither_torch_nor_transformers_nor_gguf(checkpoint: Checkpoint) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from engine.weights.checkpoint import Checkpoint\n"
        "from engine.weights.packed import prepare_packed\n"
        "stages = []\n"
        "model = prepare_packed(Checkpoint(Path(sys.argv[1])), 'auto', lambda stage, fraction: stages.append(stage))\n"
        "heavy = ('torch', 'transformers', 'gguf', 'safetensors', 'tokenizers', 'huggingface_hub')\n"
        "print([name for name in heavy if name in sys.modules], 'packing the weights' in stages, model.nbytes)"
    )
    size = prepare_packed(checkpoint).nbytes
    ran = subprocess.run([sys.executable, "-c", code, str(checkpoint.path)], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["[]", "False", str(size)]


def rewrite(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda file: file.write_bytes(change(file.read_bytes()))


def say(**changes: Any) -> Callable[[Path], object]:
    return lambda file: file.write_text(json.dumps(json.loads(file.read_bytes()) | changes))


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        (packing.DATA, rewrite(lambda data: data[: len(data) // 2])),
        (packing.DATA, rewrite(lambda data: data[:5000] + bytes([data[5000] ^ 1]) + data[5001:])),
        (packing.DATA, rewrite(lambda data: data + bytes(64))),
        (packing.DATA, rewrite(lambda data: b"")),
        (packing.DATA, Path.unlink),
        (packing.MANIFEST, Path.unlink),
        (packing.MANIFEST, rewrite(lambda data: data[: len(data) // 2])),
        (packing.MANIFEST, rewrite(lambda data: b"[1]")),
        (packing.MANIFEST, rewrite(lambda data: data.replace(b"q4_1", b"q4_0"))),
        (packing.MANIFEST, say(sha256=None)),
        (packing.MANIFEST, say(fingerprint="another model's")),
        (packing.MANIFEST, say(version=0)),
    ],
)
def test_a_damaged_file_is_made_again(checkpoint: Checkpoint, children: list[str], file: str, damage: Callable[[Path], object]) -> None:
    whole = content(prepare_packed(checkpoint))
    folder = folder_of(checkpoint)
    before = {each.name: each.read_bytes() for each in folder.iterdir()}
    damage(folder / file)
    assert content(prepare_packed(checkpoint)) == whole
    assert {each.name: each.read_bytes() for each in folder.iterdir()} == before
    assert children == ["auto", "auto"]


def test_damage_is_seen_in_a_file_whose_digest_is_remembered(
    checkpoint: Checkpoint, children: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_SETTLED_NS", 0)
    whole = content(prepare_packed(checkpoint))
    read: list[Path] = []
    hashed = cache.file_sha256
    monkeypatch.setattr(cache, "file_sha256", lambda path, progress: read.append(path) or hashed(path, progress))
    prepare_packed(checkpoint)
    prepare_packed(checkpoint)
    data = folder_of(checkpoint) / packing.DATA
    assert read == [data]
    status = data.stat()
    rewrite(lambda old: old[:-100] + bytes([old[-100] ^ 1]) + old[-99:])(data)
    os.utime(data, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert content(prepare_packed(checkpoint)) == whole
    assert children == ["auto", "auto"]


def test_a_model_in_use_survives_its_replacement(checkpoint: Checkpoint) -> None:
    model = prepare_packed(checkpoint)
    whole = content(model)
    say(version=0)(folder_of(checkpoint) / packing.MANIFEST)
    assert content(prepare_packed(checkpoint)) == content(model) == whole


def test_a_cache_that_cannot_be_written_serves_what_it_has(
    checkpoint: Checkpoint, children: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_SETTLED_NS", 0)
    prepare_packed(checkpoint)
    cache_dir = folder_of(checkpoint).parents[1]
    (cache_dir / "digests").write_text("a file where a folder should be made")
    prepare_packed(checkpoint)
    assert children == ["auto"]
    (cache_dir / "locks").rename(cache_dir / "gone")
    (cache_dir / "locks").write_text("another")
    with pytest.raises(ModelError, match=r"^m: .*locks"):
        prepare_packed(checkpoint, "bfloat16")


def test_many_at_once_pack_once(checkpoint: Checkpoint, children: list[str]) -> None:
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: content(prepare_packed(checkpoint)), range(4)))
    assert len(set(made)) == 1
    assert children == ["auto"]


def test_two_processes_at_once_pack_once(checkpoint: Checkpoint) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from engine.weights.checkpoint import Checkpoint\n"
        "from engine.weights.packed import prepare_packed\n"
        "stages = set()\n"
        "prepare_packed(Checkpoint(Path(sys.argv[1])), 'auto', lambda stage, fraction: stages.add(stage))\n"
        "print('packing the weights' in stages)"
    )
    command = [sys.executable, "-c", code, str(checkpoint.path)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert sorted(process.communicate(timeout=60)[0].strip() for process in both) == ["False", "True"]


def test_what_a_killed_packer_left_is_cleared_away(checkpoint: Checkpoint) -> None:
    left = folder_of(checkpoint).parent / f".partial-pack-{folder_of(checkpoint).name}-x"
    left.mkdir()
    (left / packing.DATA).write_bytes(b"half")
    prepare_packed(checkpoint)
    assert not list(left.parent.glob(".partial*"))


def test_a_damaged_checkpoint_is_an_error(checkpoint: Checkpoint) -> None:
    file = checkpoint.path / WEIGHTS
    data = bytearray(file.read_bytes())
    data[8] ^= 0xFF  # the header's first character; sizes stay
    file.write_bytes(data)
    with pytest.raises(ModelError, match=r"model\.safetensors.*header"):
        prepare_packed(checkpoint)
