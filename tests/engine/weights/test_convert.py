"""Preparing a model: converted once in a child process, kept under its content, made again when damaged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from engine.core import ModelError
from engine.weights import cache, checkpoint, child, convert
from engine.weights.checkpoint import Checkpoint
from engine.weights.convert import prepare
from engine.weights.gguf import GGUFModel
from engine.weights.gguf_header import read_header
from tests.engine import tiny

Kind = GGMLQuantizationType


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The sources that were converted in a child process."""
    sources: list[Path] = []
    run = child.run

    def counted(module: str, arguments: Sequence[str], *rest: Any) -> None:
        assert module == convert.__name__
        sources.append(Path(arguments[0]))
        run(module, arguments, *rest)

    monkeypatch.setattr(child, "run", counted)
    return sources


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A checkpoint to look at, not to change."""
    folder = tmp_path_factory.mktemp("converted")
    return prepare(str(tiny.write_gguf(folder / "m.gguf", tiny.config(tied_head=False))), folder / "cache")


def test_a_gguf_becomes_a_checkpoint(converted: Checkpoint) -> None:
    assert converted.name == "m"
    assert converted.config == tiny.config(tied_head=False, rms_eps=float(np.float32(1e-5)))
    assert (converted.eos_ids, converted.bos_id, converted.add_bos) == ((2, 0), 1, False)
    assert converted.template == tiny.TEMPLATE
    assert converted.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    tensors = converted.tensors()
    for name, values in tiny.tensors(tiny.config(tied_head=False)).items():
        np.testing.assert_array_equal(tensors[name].numpy(), values)
    text = "hello you and 123 <|im_end|> \u00fc\u4f60\U0001f600"
    assert Tokenizer.from_file(str(converted.tokenizer_path)).encode(text).ids == tiny.tokenizer().encode(text).ids


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0])
def test_a_ggufs_blocks_are_kept_and_mean_the_same(tmp_path: Path, cache_dir: Path, kind: GGMLQuantizationType) -> None:
    source = tiny.write_gguf(tmp_path / "m.gguf", kind=kind, kinds={"v_proj": Kind.F16, "up_proj": Kind.BF16, "down_proj": Kind.Q5_1})
    made = prepare(str(source), cache_dir)
    expected = {name for name, values in tiny.tensors().items() if values.ndim == 2}
    others = {name for name in expected if "v_proj" in name or "up_proj" in name or "down_proj" in name}
    assert made.quantised == dict.fromkeys(expected - others, kind.name)
    assert made.requantise == {name for name in others if "down_proj" in name}
    entries, gguf = made.entries(), GGUFModel(source)
    q_proj = "model.layers.1.self_attn.q_proj.weight"
    size = {Kind.Q4_0: 18, Kind.Q4_1: 20, Kind.Q8_0: 34}[kind]
    assert (entries[q_proj].dtype, entries[q_proj].shape) == ("U8", (64, size))
    assert entries["model.layers.0.self_attn.v_proj.weight"].dtype == "F16"
    assert entries["model.layers.0.mlp.up_proj.weight"].dtype == "BF16"
    assert entries["model.layers.0.mlp.down_proj.weight"].dtype == entries["model.norm.weight"].dtype == "F32"
    tensors = made.tensors()
    assert tensors.keys() == tiny.tensors().keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(tensor.float().numpy(), gguf.tensor(name), err_msg=name)
    with pytest.raises(KeyError):
        tensors["model.layers.9.mlp.up_proj.weight"]


@pytest.mark.parametrize(("kind", "offset"), [(Kind.Q4_0, 0), (Kind.Q4_1, 2), (Kind.Q8_0, 0)])
def test_a_scale_that_is_not_finite_is_damage(tmp_path: Path, cache_dir: Path, kind: GGMLQuantizationType, offset: int) -> None:
    source = tiny.write_gguf(tmp_path / "m.gguf", kind=kind)
    info = read_header(source).tensors["blk.1.ffn_down.weight"]
    data = bytearray(source.read_bytes())
    block = info.size // info.shape[0] // 2
    at = info.offset + 5 * block + offset
    data[at : at + 2] = np.float16(np.inf).tobytes()
    source.write_bytes(data)
    with pytest.raises(ModelError, match=r"blk\.1\.ffn_down\.weight.*not finite"):
        prepare(str(source), cache_dir)


def test_a_folder_becomes_a_checkpoint_in_its_own_dtype(tmp_path: Path, cache_dir: Path) -> None:
    folder = tiny.write_folder(tmp_path / "hf")
    save_file({name: values.astype(np.float16) for name, values in tiny.tensors().items()}, folder / "model.safetensors")
    made = prepare(str(folder), cache_dir)
    assert (made.name, made.config, made.template) == ("hf", tiny.CONFIG, tiny.TEMPLATE)
    for name, values in tiny.tensors().items():
        np.testing.assert_array_equal(made.tensors()[name].numpy(), values.astype(np.float16))


@pytest.mark.slow
def test_transformers_loads_a_checkpoint_of_floats_as_it_is(converted: Checkpoint) -> None:
    import torch
    from transformers import LlamaForCausalLM

    model, report = LlamaForCausalLM.from_pretrained(converted.path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.dtype == torch.float32
    for name, tensor in converted.tensors().items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_opening_a_checkpoint_imports_nothing_heavy(converted: Checkpoint) -> None:
    code = (
        "import sys; from pathlib import Path; import engine.weights.convert as convert\n"
        "convert.Checkpoint(Path(sys.argv[1]))\n"
        "print([name for name in ('torch', 'transformers', 'gguf', 'numpy', 'tokenizers', 'huggingface_hub') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code, str(converted.path)], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_tensors_are_mapped_not_read(converted: Checkpoint) -> None:
    with Path("/proc/self/maps").open() as maps:
        before = maps.read().count(str(converted.path))
    tensors = converted.tensors()
    with Path("/proc/self/maps").open() as maps:
        assert maps.read().count(str(converted.path)) > before
    assert all(tensor.is_contiguous() for tensor in tensors.values())


def test_a_source_is_converted_once_wherever_it_lies(tmp_path: Path, cache_dir: Path, children: list[Path]) -> None:
    first = tiny.write_gguf(tmp_path / "one.gguf")
    stages: list[str] = []
    one = prepare(str(first), cache_dir, lambda stage, fraction: stages.append(stage))
    assert {"checking the model", "converting the model"} == set(stages)
    moved = first.rename(tmp_path / "two.gguf")
    two = prepare(str(moved), cache_dir)
    assert (one.path, one.fingerprint) == (two.path, two.fingerprint)
    assert (one.name, two.name) == ("one", "two")
    assert children == [first]


@pytest.mark.parametrize("file", [checkpoint.WEIGHTS, checkpoint.TOKENIZER, checkpoint.CONFIG, checkpoint.TEMPLATE, checkpoint.MANIFEST])
def test_a_damaged_checkpoint_is_made_again(tmp_path: Path, cache_dir: Path, children: list[Path], file: str) -> None:
    source = str(tiny.write_gguf(tmp_path / "m.gguf"))
    made = prepare(source, cache_dir)
    whole = (made.path / file).read_bytes()
    (made.path / file).write_bytes(whole[: len(whole) // 2])
    again = prepare(source, cache_dir)
    assert len(children) == 2
    assert (again.path / file).read_bytes() == whole
    assert again.fingerprint == made.fingerprint
    assert not list(again.path.glob(".*"))
    assert len(list(again.path.parent.iterdir())) == 1


def test_a_changed_source_is_another_model(tmp_path: Path, cache_dir: Path) -> None:
    source = tiny.write_gguf(tmp_path / "m.gguf")
    status = source.stat()
    one = prepare(str(source), cache_dir)
    tiny.write_gguf(source, seed=1)
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))  # same size and times: only the content tells
    assert source.stat().st_size == status.st_size
    two = prepare(str(source), cache_dir)
    assert one.path != two.path
    assert one.fingerprint != two.fingerprint


def test_a_changed_template_is_another_fingerprint(tmp_path: Path, cache_dir: Path) -> None:
    folder = tiny.write_folder(tmp_path / "m")
    one = prepare(str(folder), cache_dir)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    two = prepare(str(folder), cache_dir)
    assert two.template == "{{ messages }}"
    assert one.fingerprint != two.fingerprint


def test_a_digest_is_remembered_until_the_file_changes(tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_SETTLED_NS", 0)
    read: list[Path] = []
    hashed = cache.file_sha256
    monkeypatch.setattr(cache, "file_sha256", lambda path, progress: read.append(path) or hashed(path, progress))
    file = tmp_path / "f"
    file.write_bytes(b"one")
    one = cache.content_digest([file], cache_dir)
    assert cache.content_digest([file], cache_dir) == one
    assert len(read) == 1
    file.write_bytes(b"two")
    assert cache.content_digest([file], cache_dir) != one
    for memo in (cache_dir / "digests").iterdir():
        memo.write_text("damaged")
    assert cache.content_digest([file], cache_dir) != one
    assert len(read) == 3


def test_many_at_once_convert_once(tmp_path: Path, cache_dir: Path, children: list[Path]) -> None:
    source = str(tiny.write_gguf(tmp_path / "m.gguf"))
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: prepare(source, cache_dir), range(4)))
    assert len({each.path for each in made}) == 1
    assert len(children) == 1


def test_two_processes_at_once_convert_once(tmp_path: Path, cache_dir: Path) -> None:
    source = tiny.write_gguf(tmp_path / "m.gguf")
    code = (
        "import sys; from pathlib import Path; from engine.weights.convert import prepare\n"
        "stages = set()\n"
        "made = prepare(sys.argv[1], Path(sys.argv[2]), lambda stage, fraction: stages.add(stage))\n"
        "print('converting the model' in stages, made.fingerprint)"
    )
    command = [sys.executable, "-c", code, str(source), str(cache_dir)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=60)[0].split() for process in both]
    assert sorted(word for word, _ in said) == ["False", "True"]
    assert len({fingerprint for _, fingerprint in said}) == 1


def test_the_childs_error_is_ours(tmp_path: Path, cache_dir: Path) -> None:
    source = tiny.write_gguf(tmp_path / "m.gguf", metadata={"tokenizer.ggml.model": "smoke signals"})
    with pytest.raises(ModelError, match="smoke signals"):
        prepare(str(source), cache_dir)
    assert not list((cache_dir / "converted").iterdir())


def test_a_crashing_child_says_how(tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny.write_gguf(tmp_path / "m.gguf")
    (tmp_path / "gguf.py").write_text("import sys; sys.stderr.write('out of luck'); sys.exit(7)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ModelError, match=r"m\.gguf.*exit code 7: out of luck"):
        prepare(str(source), cache_dir)


def test_modules_of_the_working_directory_are_not_imported(tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gguf.py").write_text("raise SystemExit('imported')")
    source = tiny.write_gguf(tmp_path / "m.gguf")
    monkeypatch.chdir(tmp_path)
    assert prepare(source.name, cache_dir).name == "m"


def test_pickles_are_refused_before_any_child(tmp_path: Path, cache_dir: Path, children: list[Path]) -> None:
    folder = tiny.write_folder(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin: a pickle"):
        prepare(str(folder), cache_dir)
    assert not children


def test_an_unreadable_source_is_a_model_error(tmp_path: Path) -> None:
    source = tiny.write_gguf(tmp_path / "m.gguf")
    (tmp_path / "cache").write_text("a file where the cache should be")
    with pytest.raises(ModelError, match="cache"):
        prepare(str(source), tmp_path / "cache")


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"version": 0}, "version 2 expected, got 0"),
        ({"files": None}, "damaged"),
        ({"files": {}}, "None bytes expected"),
        ({"eos_ids": [300]}, "eos_ids"),
        ({"bos_id": "x"}, "bos_id"),
        ({"quantised": {"model.norm.weight": "Q6_K"}}, "quantised.*Q4_0, Q4_1, Q8_0, got 'Q6_K'"),
        ({"quantised": {"model.norm.weight": ["Q8_0"]}}, "quantised.*got ..Q8_0"),
        ({"quantised": None}, "damaged"),
        ({"name": None}, ""),
    ],
)
def test_a_manifest_that_lies_is_refused(converted: Checkpoint, tmp_path: Path, changes: dict[str, Any], names: str) -> None:
    for file in converted.path.iterdir():
        (tmp_path / file.name).symlink_to(file)
    manifest = json.loads((tmp_path / checkpoint.MANIFEST).read_bytes()) | changes
    (tmp_path / checkpoint.MANIFEST).unlink()
    (tmp_path / checkpoint.MANIFEST).write_text(json.dumps(manifest))
    if not names:
        assert Checkpoint(tmp_path, "given").name == "given"
        return
    with pytest.raises(ModelError, match=names):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("quantised", "names"),
    [
        ({"model.norm.weight": "Q8_0"}, "quantised: expected matrices.*model.norm.weight"),
        ({"model.layers.7.mlp.up_proj.weight": "Q8_0"}, "quantised: expected matrices.*layers.7"),
        ({"lm_head.weight": "Q8_0"}, r"lm_head.weight: shape \[300, 34\] expected, \[300, 32\] found"),
    ],
)
def test_blocks_that_are_none_are_refused(converted: Checkpoint, tmp_path: Path, quantised: dict[str, str], names: str) -> None:
    for file in converted.path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    manifest = json.loads((tmp_path / checkpoint.MANIFEST).read_bytes())
    (tmp_path / checkpoint.MANIFEST).write_text(json.dumps(manifest | {"quantised": quantised}))
    with pytest.raises(ModelError, match=names):
        Checkpoint(tmp_path).tensors()


def test_tensors_that_are_not_the_configs_are_refused(converted: Checkpoint, tmp_path: Path) -> None:
    for file in converted.path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / checkpoint.CONFIG).read_bytes())
    text = json.dumps(config | {"num_hidden_layers": 1}, indent=2)
    (tmp_path / checkpoint.CONFIG).write_text(text)
    with pytest.raises(ModelError, match="unknown tensors"):
        Checkpoint(tmp_path).tensors()
