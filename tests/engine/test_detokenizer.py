"""Text token by token: joined deltas equal the full decode (E7), stop strings never leak (E6), ids end where the text ends."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core import RequestError
from engine.detokenizer import Detokenizer, TextStream
from engine.tokenizer import Place, Tokenizer
from tests.engine.small_tokenizers import byte_level_values, make, sentencepiece_values

# Stop strings out of few characters, so that they overlap with themselves, each other and the text.
PIECES = ["D", "EF", "G", "E", "DD", "DE", "🙂", "é", " ", "x", "\n\n"]
TEXT = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)
STOPS = st.lists(st.lists(st.sampled_from(PIECES), min_size=1, max_size=3).map("".join), max_size=4).map(tuple)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make(tmp_path_factory.mktemp("bytes"), byte_level_values())


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make(tmp_path_factory.mktemp("pieces"), sentencepiece_values())


def first_stop(text: str, stops: tuple[str, ...]) -> str:
    """`text` up to the first stop string, by the definition: the one completed first, of these the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return text


def ids_of_bytes(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token a byte."""
    known = {tokenizer.token_bytes(id): id for id in range(tokenizer.vocab_size)}
    return [known[bytes([byte])] for byte in data]


@settings(deadline=None)
@given(data=st.data())
def test_joined_deltas_equal_the_full_decode(byte_level: Tokenizer, sentencepiece: Tokenizer, data: st.DataObject) -> None:
    for tokenizer in (byte_level, sentencepiece):
        ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20))
        detokenizer = Detokenizer(tokenizer)
        assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == tokenizer.decode(ids)


@settings(deadline=None)
@given(text=st.text(st.characters(exclude_characters="\ufffd", exclude_categories=["Cs"])))
def test_no_delta_has_half_a_character(byte_level: Tokenizer, text: str) -> None:
    detokenizer = Detokenizer(byte_level)
    deltas = [detokenizer.push(id) for id in ids_of_bytes(byte_level, text.encode())]
    assert "\ufffd" not in "".join(deltas)
    assert "".join(deltas) == text and detokenizer.flush() == ""


def test_an_incomplete_character_shows_at_the_end(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_level)
    assert [detokenizer.push(id) for id in ids_of_bytes(byte_level, "a🙂".encode()[:-1])] == ["a", "", "", ""]
    assert detokenizer.flush() == "\ufffd"


def test_only_the_first_space_is_the_tokenizers_own(sentencepiece: Tokenizer) -> None:
    detokenizer = Detokenizer(sentencepiece)
    ids = [1, *sentencepiece.encode_plain("hello world", Place.START), *sentencepiece.encode_plain(" hello", Place.INSIDE)]
    assert [detokenizer.push(id) for id in ids] == ["", "hello", " world", " hello"]


def test_a_stop_string_split_over_tokens_never_shows(byte_level: Tokenizer) -> None:
    stream = TextStream(byte_level, ("DEFG",))
    pieces = [byte_level.encode_plain(piece) for piece in ("abc", "D", "EF", "G", "more")]
    shown = [stream.push(id) for piece in pieces for id in piece]
    assert "".join(shown) == "abc"
    assert stream.stopped and stream.flush() == ""
    assert stream.visible_ids() == pieces[0]


def test_a_near_miss_is_shown_as_soon_as_it_is_one(byte_level: Tokenizer) -> None:
    stream = TextStream(byte_level, ("DEFG",))
    shown = [stream.push(id) for id in byte_level.encode_plain("DEDEFx")]
    assert shown == ["", "", "DE", "", "", "DEFx"]
    assert not stream.stopped


def test_a_near_miss_at_the_end_is_flushed(byte_level: Tokenizer) -> None:
    stream = TextStream(byte_level, ("DEFG",))
    ids = byte_level.encode_plain("xDEF")
    assert [stream.push(id) for id in ids] == ["x", "", "", ""]
    assert stream.visible_ids() == ids[:1]
    assert stream.flush() == "DEF"
    assert not stream.stopped and stream.visible_ids() == ids


def test_a_stop_string_may_hold_any_character(byte_level: Tokenizer) -> None:
    stream = TextStream(byte_level, ("b🙂",))
    ids = ids_of_bytes(byte_level, "ab🙂c".encode())
    assert "".join(map(stream.push, ids)) == "a"
    assert stream.stopped and stream.visible_ids() == ids[:1]


def test_the_stop_string_completed_first_wins_however_tokens_are_cut(byte_level: Tokenizer) -> None:
    whole = next(id for id in range(byte_level.vocab_size) if byte_level.token_bytes(id) == b"hello")
    for ids in ([whole], ids_of_bytes(byte_level, b"hello")):
        stream = TextStream(byte_level, ("hello", "ell"))
        assert "".join(map(stream.push, ids)) == "h"
    stream = TextStream(byte_level, ("ell", "hell"))  # completed at once: the longest
    assert stream.push(whole) == ""


def test_a_stop_string_that_begins_inside_a_token_leaves_the_characters_before_it(byte_level: Tokenizer) -> None:
    ids = byte_level.encode_plain("the hello")
    stream = TextStream(byte_level, ("llo",))
    assert "".join(map(stream.push, ids)) == "the he"
    visible = stream.visible_ids()
    assert byte_level.decode(visible) == "the he"
    assert visible[:2] == ids[:2] and visible[2:] == byte_level.encode_plain("he")


def test_a_stop_string_after_half_a_token_keeps_its_leading_space(sentencepiece: Tokenizer) -> None:
    stream = TextStream(sentencepiece, ("o",))
    assert stream.push(sentencepiece.encode_plain("hello")[0]) == "hell"
    assert sentencepiece.decode(stream.visible_ids()) == "hell"
    stream = TextStream(sentencepiece, ("q",))
    (token,) = sentencepiece.encode_plain("  q")  # of two spaces, decoding takes off one
    assert stream.push(token) == " "
    assert sentencepiece.decode(stream.visible_ids()) == " "


@settings(deadline=None)
@given(text=TEXT, stops=STOPS, data=st.data())
def test_stop_strings_follow_their_definition(
    byte_level: Tokenizer, sentencepiece: Tokenizer, text: str, stops: tuple[str, ...], data: st.DataObject
) -> None:
    for tokenizer in (byte_level, sentencepiece):
        end = data.draw(st.integers(0, len(text)))  # tokens cut in different ways
        ids = tokenizer.encode_plain(text[:end]) + tokenizer.encode_plain(text[end:], Place.INSIDE)
        full, stream, shown = tokenizer.decode(ids), TextStream(tokenizer, stops), ""
        for id in ids:
            shown += stream.push(id)
            assert first_stop(full, stops).startswith(shown)
            assert tokenizer.decode(stream.visible_ids()) == shown
        shown += stream.flush()
        assert shown == first_stop(full, stops)
        assert stream.stopped == (shown != full)
        assert tokenizer.decode(stream.visible_ids()) == shown
        if not stream.stopped:
            assert stream.visible_ids() == ids


def test_stop_strings_that_repeat_themselves(byte_level: Tokenizer) -> None:
    """All of them of four or five letters, in every text of seven."""
    ids = dict(zip("ab", ids_of_bytes(byte_level, b"ab"), strict=True))
    texts = ["".join(letters) for letters in itertools.product("ab", repeat=7)]
    for stop in ("".join(letters) for size in (4, 5) for letters in itertools.product("ab", repeat=size)):
        for text in texts:
            stream = TextStream(byte_level, (stop,))
            assert "".join(stream.push(ids[letter]) for letter in text) + stream.flush() == first_stop(text, (stop,)), (stop, text)


@settings(deadline=None)
@given(data=st.binary(max_size=10), stops=st.lists(st.sampled_from(["\ufffd", "\ufffd\ufffd", "a", "é"]), max_size=2).map(tuple))
def test_bytes_that_are_not_utf8_are_text_too(byte_level: Tokenizer, data: bytes, stops: tuple[str, ...]) -> None:
    ids = ids_of_bytes(byte_level, data)
    stream = TextStream(byte_level, stops)
    shown = "".join(map(stream.push, ids)) + stream.flush()
    assert shown == first_stop(data.decode(errors="replace"), stops)


def test_no_more_than_a_possible_stop_string_is_held_back(byte_level: Tokenizer) -> None:
    stream, shown = TextStream(byte_level, ("aab",)), ""
    for count, id in enumerate(byte_level.encode_plain("x" + "a" * 50), 1):
        shown += stream.push(id)
        assert len(shown) >= count - 2


def test_an_empty_stop_string_is_refused(byte_level: Tokenizer) -> None:
    with pytest.raises(RequestError, match="at least one character") as caught:
        TextStream(byte_level, ("a", ""))
    assert caught.value.param == "stop"


def test_time_is_linear_in_the_replys_length(byte_level: Tokenizer) -> None:
    """Nothing is looked at twice, not even by a stop string that nearly matches all the way."""
    stop = ("a" * 500 + "b",)
    (token,) = ids_of_bytes(byte_level, b"a")

    def seconds(count: int) -> float:
        stream, begin = TextStream(byte_level, stop), time.perf_counter()
        for _ in range(count):
            stream.push(token)
        assert len(stream.flush()) == 500
        return time.perf_counter() - begin

    short, long = (min(seconds(count) for _ in range(3)) for count in (2_000, 16_000))
    assert long < 8 * short * 3
