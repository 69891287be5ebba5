"""Hugging Face folders: one file or shards, headers held against the file, pickles never opened (case S6)."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies
from safetensors.numpy import load_file, save_file

from engine.core import ModelError
from engine.weights import config as hf_config
from engine.weights import safetensors as st
from tests.engine import tiny


def read(model: st.FolderModel) -> dict[str, np.ndarray]:
    return {name: np.frombuffer(b"".join(model.pieces(name)), np.float32).reshape(entry.shape) for name, entry in model.entries.items()}


@pytest.mark.parametrize("tied", [True, False])
def test_a_folder_is_read_exactly(tmp_path: Path, tied: bool) -> None:
    config = tiny.config(tied_head=tied)
    model = st.FolderModel(tiny.write_folder(tmp_path / "m", config))
    assert model.config == config
    expected = tiny.tensors(config)
    found = read(model)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values)


def shard(folder: Path) -> None:
    """Split a folder's weights into two files and their index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {f"model-0000{part}-of-00002.safetensors": list(tensors)[part - 1 :: 2] for part in (1, 2)}
    for file, names in files.items():
        save_file({name: tensors[name] for name in names}, folder / file)
    mapping = {name: file for file, names in files.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": mapping}))


def test_shards_are_one_model(tmp_path: Path) -> None:
    folder = tiny.write_folder(tmp_path / "m")
    shard(folder)
    found = read(st.FolderModel(folder))
    for name, values in tiny.tensors().items():
        np.testing.assert_array_equal(found[name], values)


@pytest.mark.parametrize("file", ["model-00009-of-00002.safetensors", "../m/model-00001-of-00002.safetensors", "/etc/passwd"])
def test_an_index_names_only_files_beside_it(tmp_path: Path, file: str) -> None:
    folder = tiny.write_folder(tmp_path / "m")
    shard(folder)
    index = folder / "model.safetensors.index.json"
    said = json.loads(index.read_bytes())
    said["weight_map"]["model.norm.weight"] = file
    index.write_text(json.dumps(said))
    with pytest.raises(ModelError, match=r"index\.json.*file beside it"):
        st.FolderModel(folder)


def test_an_index_that_lies_is_refused(tmp_path: Path) -> None:
    folder = tiny.write_folder(tmp_path / "m")
    shard(folder)
    index = folder / "model.safetensors.index.json"
    said = json.loads(index.read_bytes())
    for name, file in said["weight_map"].items():
        said["weight_map"][name] = file.replace("00001-", "0000x-").replace("00002-", "00001-").replace("0000x-", "00002-")
    index.write_text(json.dumps(said))
    with pytest.raises(ModelError, match=r"is not in model-"):
        st.FolderModel(folder)


def test_half_precision_and_leftovers_of_old_checkpoints(tmp_path: Path) -> None:
    folder = tiny.write_folder(tmp_path / "m")
    half = {name: values.astype(np.float16) for name, values in tiny.tensors().items()}
    half["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float16)
    half["lm_head.weight"] = half["model.embed_tokens.weight"]  # the table once more, though the config ties it
    save_file(half, folder / "model.safetensors")
    model = st.FolderModel(folder)
    assert {entry.dtype for entry in model.entries.values()} == {"F16"}
    assert model.entries.keys() == tiny.tensors().keys()


class Bomb:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return Path.touch, (self.target,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "model.ckpt"])
def test_a_pickle_is_refused_unopened(tmp_path: Path, name: str) -> None:
    folder = tiny.write_folder(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    with pytest.raises(ModelError, match=rf"{name}: a pickle.*never read"):
        st.FolderModel(folder)
    assert not (tmp_path / "ran").exists()


def rewritten(data: bytes, change: Callable[[dict[str, Any]], Any]) -> bytes:
    """The file with its JSON header changed."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    text = json.dumps(change(header) or header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda data: b"", "truncated"),
        (lambda data: data[:5], "truncated"),
        (lambda data: (1 << 60).to_bytes(8, "little") + data[8:], "header.*truncated"),
        (lambda data: data[:8] + b"x" + data[9:], "JSON"),
        (lambda data: data[:-1], "truncated"),
        (lambda data: data + b"x", "expected .* bytes"),
        (lambda data: rewritten(data, lambda header: [1]), "JSON object"),
        (lambda data: rewritten(data, lambda header: header[NORM].update(shape=[1 << 40])), "norm.*fit"),
        (lambda data: rewritten(data, lambda header: header[NORM].update(shape=[-32])), "norm.*expected"),
        (lambda data: rewritten(data, lambda header: header[NORM].update(shape=[2] * 1000)), "norm.*expected"),
        (lambda data: rewritten(data, lambda header: header[NORM].update(shape=[16, 2])), "norm.*shape"),
        (lambda data: rewritten(data, lambda header: header[NORM].update(dtype="F8_E4M3")), "norm.*dtype.*F8_E4M3"),
        (lambda data: rewritten(data, lambda header: header[NORM].update(dtype=["F32"])), "norm"),
        (lambda data: rewritten(data, lambda header: header[NORM].update(data_offsets=[0, 128])), "start at"),
        (lambda data: rewritten(data, lambda header: header[NORM].update(data_offsets=[0, 128, 3])), "norm.*data_offsets"),
        (lambda data: rewritten(data, lambda header: header.update({NORM: 1})), "norm.*expected"),
        (lambda data: data.replace(b"model.norm.weight", b"model.Norm.weight"), "norm.weight is missing"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, change: Callable[[bytes], bytes], names: str) -> None:
    folder = tiny.write_folder(tmp_path / "m")
    file = folder / "model.safetensors"
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(ModelError, match=f"m.*{names}"):
        st.FolderModel(folder)


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    folder = tiny.write_folder(tmp_path_factory.mktemp("fuzz") / "m")
    return folder, (folder / "model.safetensors").read_bytes()


@settings(max_examples=200, deadline=2000)
@given(
    edits=strategies.lists(strategies.tuples(strategies.floats(0, 1), strategies.binary(min_size=1, max_size=4)), min_size=1, max_size=3)
)
def test_any_header_is_read_whole_or_refused(honest: tuple[Path, bytes], edits: list[tuple[float, bytes]]) -> None:
    folder, data = honest
    changed = bytearray(data)
    header_end = 8 + int.from_bytes(data[:8], "little")
    for where, new in edits:
        at = int(where * (header_end - len(new)))
        changed[at : at + len(new)] = new
    (folder / "model.safetensors").write_bytes(changed)
    try:
        found = {name: values.shape for name, values in read(st.FolderModel(folder)).items()}
    except ModelError as error:
        assert str(folder) in str(error)
        return
    assert found == hf_config.tensor_shapes(tiny.CONFIG)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        st.FolderModel(tmp_path)


def test_a_written_file_is_what_the_library_reads(tmp_path: Path) -> None:
    tensors = {"a": np.arange(3, dtype=np.float16), "b": np.arange(6, dtype=np.float32).reshape(2, 3), "c": np.arange(5, dtype=np.float16)}
    kinds = {name: ("F32" if values.itemsize == 4 else "F16", values.shape) for name, values in tensors.items()}
    done: list[float] = []
    st.write(tmp_path / "w.safetensors", kinds, lambda name: [tensors[name]], done.append)
    assert done == sorted(done)
    assert done[-1] == 1.0
    entries = st.read_header(tmp_path / "w.safetensors")
    assert all(entry.offset % (4 if entry.dtype == "F32" else 2) == 0 for entry in entries.values())
    for name, values in load_file(tmp_path / "w.safetensors").items():
        np.testing.assert_array_equal(values, tensors[name])


def facts(folder: Path, **settings: Any) -> Any:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_bytes()) | settings))
    model = st.FolderModel(folder)
    return model.tokens(model.tokenizer())


def test_every_end_of_sequence_the_folder_names(tmp_path: Path) -> None:
    folder = tiny.write_folder(tmp_path / "m", eos_token_id=[5, 6])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    tokens = facts(folder)
    assert tokens.eos_ids == (2, 5, 6, 7, 0)  # tokenizer_config's, config's, generation_config's, then <|endoftext|>
    assert (tokens.bos_id, tokens.add_bos, tokens.special_tokens) == (1, False, {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"})


def test_an_end_of_sequence_past_the_vocabulary_is_refused(tmp_path: Path) -> None:
    folder = tiny.write_folder(tmp_path / "m", eos_token_id=[5, 300])
    with pytest.raises(ModelError, match=r"config\.json: eos_token_id.*299.*300"):
        facts(folder)


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path: Path) -> None:
    folder = tiny.write_folder(tmp_path / "m")
    made = tiny.tokenizer()
    made.add_special_tokens(["<extra>"])
    made.save(str(folder / "tokenizer.json"))
    with pytest.raises(ModelError, match="up to 300, the embedding only 300 rows"):
        facts(folder)


def test_a_broken_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = tiny.write_folder(tmp_path / "m")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json: not a tokenizer"):
        facts(folder)


def test_where_a_chat_template_may_be(tmp_path: Path) -> None:
    folder = tiny.write_folder(tmp_path / "m")
    assert facts(folder).template == tiny.TEMPLATE
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert facts(folder, chat_template=named).template == "D"
    assert facts(folder, chat_template=None).template is None
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "J"}))
    assert facts(folder).template == "J"
    (folder / "chat_template.jinja").write_text("F\n")
    assert facts(folder).template == "F\n"
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match=r"chat_template.*int"):
        facts(folder, chat_template=3)
