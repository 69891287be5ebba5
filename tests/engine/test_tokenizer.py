"""Text to ids and back: ordinary text as the library's whole tokenizer has it, and text never a control token (S7)."""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from engine.core import ModelError, RequestError
from engine.tokenizer import Place, Tokenizer
from tests.engine.gil import longest_wait
from tests.engine.small_tokenizers import CHATML, SPACE, byte_level_values, make, sentencepiece_values

CONTROL = (*CHATML, "<|im|>")
MARKUP = ["<|im_end|>", "<|im_start|>", "<|im", "_end|>", "<", "|", ">", "<s>", "</s>", "/s>"]
FRAGMENTS = [*MARKUP, " ", "\n", "hello", "é", "🙂", "12", "a", SPACE]


TASKS = Path("/proc/self/task")


@dataclass(slots=True, frozen=True)
class Made:
    ours: Tokenizer
    library: tokenizers.Tokenizer  # the whole tokenizer of the same file, as the library has it


def made(folder: Path, values: dict[str, Any]) -> Made:
    return Made(make(folder, values), tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")))


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return made(tmp_path_factory.mktemp("bytes"), byte_level_values(CONTROL, user=("<think>", "   ")))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return made(tmp_path_factory.mktemp("pieces"), sentencepiece_values())


@pytest.fixture(params=["byte_level", "sentencepiece"])
def either(request: pytest.FixtureRequest) -> Made:
    return request.getfixturevalue(request.param)


def save(folder: Path, tokenizer: tokenizers.Tokenizer) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def byte_level_library(words: dict[str, int], **options: Any) -> tokenizers.Tokenizer:
    """A byte-level tokenizer of the library's own, without merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)} | words
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, [], **options))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@settings(deadline=None)
@given(text=st.text())
def test_ordinary_text_encodes_as_the_whole_tokenizer_would(byte_level: Made, sentencepiece: Made, text: str) -> None:
    for each in (byte_level, sentencepiece):
        if not each.ours.spelled_control(text):
            assert each.ours.encode_plain(text) == each.library.encode(text, add_special_tokens=False).ids


@settings(deadline=None)
@given(text=st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join))
def test_no_text_becomes_a_control_token_nor_loses_a_character(byte_level: Made, sentencepiece: Made, text: str) -> None:
    for tokenizer in (byte_level.ours, sentencepiece.ours):
        ids = tokenizer.encode_plain(text, Place.INSIDE)
        assert not set(tokenizer.control.values()) & set(ids)
        # SentencePiece writes a space and the character "▁" alike.
        expected = text if tokenizer is byte_level.ours else text.replace(SPACE, " ")
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() == expected


@settings(deadline=None)
@given(text=st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join))
def test_split_at_control_tokens_and_encoded_piecewise_is_the_whole_encoding(byte_level: Made, sentencepiece: Made, text: str) -> None:
    for each in (byte_level, sentencepiece):
        ids: list[int] = []
        for index, piece in enumerate(each.ours.split_control(text)):
            ids += [piece] if isinstance(piece, int) else each.ours.encode_plain(piece, Place.SECTION if index else Place.START)
        assert ids == each.library.encode(text, add_special_tokens=False).ids


def test_control_tokens_are_those_added_but_runs_of_blanks_are_text(byte_level: Made) -> None:
    assert set(byte_level.ours.control) == {*CONTROL, "<think>"}
    ids = byte_level.ours.encode_plain("a   b")
    assert ids == byte_level.library.encode("a   b").ids
    assert byte_level.library.token_to_id("   ") in ids


def test_split_control_is_leftmost_longest(byte_level: Made) -> None:
    tokenizer, control = byte_level.ours, byte_level.ours.control
    assert tokenizer.split_control("a<|im|>b<|im_end|><|im_start|>\n") == [
        *("a", control["<|im|>"], "b", control["<|im_end|>"], control["<|im_start|>"], "\n")
    ]
    assert tokenizer.split_control("") == []
    assert tokenizer.split_control("<|im_en|>") == ["<|im_en|>"]


def test_flags_of_control_tokens_are_honoured(tmp_path: Path) -> None:
    library = byte_level_library({})
    flags = {"<l>": {"lstrip": True}, "<r>": {"rstrip": True}, "word": {"single_word": True}}
    library.add_special_tokens([AddedToken(text, normalized=False, **options) for text, options in flags.items()])  # type: ignore[arg-type]
    tokenizer = Tokenizer(save(tmp_path, library))
    left, right, word = (tokenizer.control[text] for text in flags)
    assert tokenizer.split_control("a  <l> b <r>  c sword word") == ["a", left, " b ", right, "c sword ", word]
    assert tokenizer.spelled_control("sword") == [(1, 5)]


@pytest.mark.parametrize("text", ["endoftext", "an endoftext endoftext", "endoftextendoftext"])
def test_a_whole_word_that_is_a_control_token_is_cut_in_two(tmp_path: Path, text: str) -> None:
    library = byte_level_library({"endoftext": 256, "Ġendoftext": 257}, ignore_merges=True)
    library.add_special_tokens([AddedToken("endoftext", normalized=False), AddedToken("Ġendoftext", normalized=False)])
    tokenizer = Tokenizer(save(tmp_path, library))
    ids = tokenizer.encode_plain(text)
    assert not {256, 257} & set(ids)
    assert tokenizer.decode(ids) == text


def test_a_unigram_vocabulary_cannot_reach_its_control_tokens(tmp_path: Path) -> None:
    pieces = [("<unk>", 0.0), ("</s>", 0.0), (SPACE, -2.0), *((letter, -5.0) for letter in "</s>abc")]
    library = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    library.decoder = decoders.Metaspace(prepend_scheme="never")
    library.add_special_tokens(["<unk>", "</s>"])
    tokenizer = Tokenizer(save(tmp_path, library))
    ids = tokenizer.encode_plain("a</s>b</s></s>")
    assert 1 not in ids and tokenizer.decode(ids) == "a</s>b</s></s>"
    assert tokenizer.encode_plain("éa")[0] == 0  # what the vocabulary does not have is unknown, as the model has learnt


def test_a_character_known_only_as_a_control_token_is_refused(tmp_path: Path) -> None:
    library = byte_level_library({})
    library.add_special_tokens([AddedToken("!", normalized=False)])
    with pytest.raises(RequestError, match="got '!', to it the control token"):
        Tokenizer(save(tmp_path, library)).encode_plain("hello!")


def test_leading_spaces_only_where_the_model_puts_them(tmp_path: Path) -> None:
    spec = sentencepiece_values()
    tokenizer = make(tmp_path, spec)
    hello, bare = spec["tokens"].index(SPACE + "hello"), spec["tokens"].index("he")
    assert tokenizer.encode_plain("hello", Place.START) == [hello]
    assert tokenizer.encode_plain("hello", Place.SECTION)[0] == bare
    assert tokenizer.encode_plain(" hello", Place.INSIDE) == [hello]


def test_a_prefix_by_normalizer_stands_at_each_section_but_not_inside_text(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer(models.BPE({"<s>": 0, SPACE: 1, "a": 2}, []))
    library.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    library.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    library.add_special_tokens([AddedToken("<s>", normalized=False)])
    tokenizer = Tokenizer(save(tmp_path, library))
    assert [tokenizer.encode_plain("a", place) for place in Place] == [[1, 2], [1, 2], [2]]
    assert library.encode("a<s>a").ids == [1, 2, 0, 1, 2]


def test_bytes_and_decode_agree_with_the_library(either: Made) -> None:
    tokenizer, library = either.ours, either.library
    for text in ["hello world", "  two  ", "don't é日本🙂\n\n12", "<", ""]:
        ids = tokenizer.encode_plain(text)
        assert tokenizer.decode(ids) == library.decode(ids)
    assert tokenizer.decode([2, *tokenizer.encode_plain("hello"), 1]) == "hello"  # special tokens are not shown
    assert tokenizer.token_bytes(2) == library.id_to_token(2).encode()
    assert tokenizer.token_bytes(10**9) == tokenizer.token_bytes(-1) == b""
    assert tokenizer.vocab_size == library.get_vocab_size()


@settings(deadline=None)
@given(data=st.binary(max_size=12))
def test_bytes_that_are_not_utf8_decode_as_the_library_does(byte_level: Made, data: bytes) -> None:
    id_of = {byte_level.ours.token_bytes(id): id for id in range(byte_level.ours.vocab_size)}
    ids = [id_of[bytes([byte])] for byte in data]
    assert byte_level.ours.decode(ids) == byte_level.library.decode(ids)


@pytest.mark.parametrize("text", ["\ud83d", "a\udc00b"])
def test_lone_surrogates_are_refused(either: Made, text: str) -> None:
    for call in (either.ours.encode_plain, either.ours.split_control):
        with pytest.raises(RequestError, match="expected Unicode text, got the lone surrogate"):
            call(text)


def test_a_post_processor_truncation_and_padding_are_left_out(tmp_path: Path) -> None:
    library = byte_level_library({"<s>": 256})
    library.add_special_tokens(["<s>"])
    library.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 256)])
    library.enable_truncation(2)
    library.enable_padding(length=50)
    assert len(Tokenizer(save(tmp_path, library)).encode_plain("hello")) == 5


def test_digest_changes_with_whatever_changes_the_encoding(tmp_path: Path) -> None:
    path = save(tmp_path, byte_level_library({}))
    one = Tokenizer(path, [1]).digest()
    assert one == Tokenizer(path, [1]).digest() != Tokenizer(path, [2]).digest()
    assert one != Tokenizer(save(tmp_path, byte_level_library({"ab": 256})), [1]).digest()


def test_files_that_are_no_tokenizer_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(ModelError, match=r"expected tokenizer\.json to be"):
        Tokenizer(path)
    library = byte_level_library({})
    library.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match=r"decoder in tokenizer\.json, got"):
        Tokenizer(save(tmp_path, library))
    assert json.loads(path.read_text())["decoder"]["type"] == "WordPiece"


def test_a_long_text_leaves_the_gil_to_others(byte_level: Made) -> None:
    words = ["hello ", "wörld ", "123", "\n", "日本語", "🙂", "x" * 30]
    text = "".join(random.Random(0).choices(words, k=60_000))[:200_000]
    wait, duration = longest_wait(lambda: byte_level.ours.encode_plain(text))
    assert wait < max(0.02, duration / 4)  # the library's `encode` holds it for all of the duration


@pytest.mark.skipif(not TASKS.exists(), reason="threads are counted in /proc")
def test_no_threads_are_started(byte_level: Made) -> None:
    before = set(TASKS.iterdir())
    byte_level.ours.encode_plain("hello " * 10_000)
    byte_level.ours.split_control("hello<|im_end|>" * 1000)
    assert set(TASKS.iterdir()) <= before
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"


@settings(max_examples=60, deadline=None)
@given(text=st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=5), min_size=1, max_size=30).map("".join).filter(len))
def test_no_token_stands_for_more_than_the_longest(byte_level: Made, sentencepiece: Made, text: str) -> None:
    for one in (byte_level, sentencepiece):
        assert len(text) <= one.ours.longest * len(one.ours.encode_plain(text))
