"""The tokenizer built from a GGUF's metadata against a naive one that follows the same metadata by the book."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import regex

from engine.core import ModelError
from engine.weights import gguf_tokenizer
from tests.engine.small_tokenizers import SPACE, byte_alphabet, byte_level_values, sentencepiece_values, write_gguf

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
ANY_CASE = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+ENDING"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*ENDING"
    r"|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Expressions applied one after the other, as published with the models.
EXPRESSIONS = {
    "gpt-2": [GPT2],
    "smollm": [r"\p{N}", GPT2],
    "starcoder": [r"\p{N}", GPT2],
    "llama-bpe": [rf"(?:{ANY_CASE})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{TAIL}"],
    "smaug-bpe": [rf"(?:{ANY_CASE})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{TAIL}"],
    "qwen2": [rf"(?:{ANY_CASE})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{TAIL}"],
    "tekken": [CASED.replace("ENDING", "").replace("DIGITS", r"\p{N}")],
    "gpt-4o": [CASED.replace("ENDING", f"(?:{ANY_CASE})?").replace("DIGITS", r"\p{N}{1,3}")],
}
WHOLE_WORDS = {"llama-bpe", "tekken"}
TEXTS = [
    "the hello world",
    "12 123 1234567 3.14 x12y ١٢٣ ½ Ⅷ²",
    "日本語 中文123字 한국어",
    "🙂👩‍👩‍👧‍👦 ok 🇩🇪🏳️‍🌈!",
    "def f(x):\n    return x // 12  # don't\n\n\nclass A:\n\tpass\r\n\r\n",
    "  two   three    \n  \n\n end   ",
    "don't DON'T we'll WE'LL it's IT'S 'tis o'clock",
    "Café déjà naïve ÀÉ ß ŒUVRE camelCaseWords HTTPServer",
    "!!! ... --- ((([[[ //// \\\\ <|im_end|",
    " ",
    "\n\n",
    "a\u00a0b\u3000c\u200bd\t\te",
    "\U0001f600" * 3 + "é" * 3,
]


def cut(text: str, expression: str) -> list[str]:
    """`text` cut into what the expression matches and what lies between."""
    parts, end = [], 0
    for match in regex.finditer(expression, text):
        parts += [text[end : match.start()], match[0]]
        end = match.end()
    return [part for part in [*parts, text[end:]] if part]


def naive_bpe(values: dict[str, Any], text: str) -> list[int]:
    """Byte-level BPE as defined: cut into words, then join the pair of the lowest rank, leftmost first, until none is left."""
    ids = {token: index for index, token in enumerate(values["tokens"])}
    ranks = {tuple(line.split(" ")): rank for rank, line in enumerate(values["merges"])}
    words, alphabet, output = [text], byte_alphabet(), []
    for expression in EXPRESSIONS[values["pre"]]:
        words = [part for word in words for part in cut(word, expression)]
    for word in words:
        symbols = [alphabet[byte] for byte in word.encode()]
        if values["pre"] in WHOLE_WORDS and "".join(symbols) in ids:
            symbols = ["".join(symbols)]
        while len(symbols) > 1:
            best = min(range(len(symbols) - 1), key=lambda at: ranks.get((symbols[at], symbols[at + 1]), len(ranks)))
            if (symbols[best], symbols[best + 1]) not in ranks:
                break
            symbols[best : best + 2] = [symbols[best] + symbols[best + 1]]
        output += [ids[symbol] for symbol in symbols]
    return output


def naive_sentencepiece(values: dict[str, Any], text: str) -> list[int]:
    """SentencePiece BPE as defined: join the neighbours whose joint piece scores best, leftmost first; bytes for what is unknown."""
    ids = {token: index for index, token in enumerate(values["tokens"])}
    scores = {
        token: score
        for token, score, kind in zip(values["tokens"], values["scores"], values["token_type"], strict=True)
        if kind == gguf.TokenType.NORMAL
    }
    symbols = list((" " + text if values["add_space_prefix"] and not text.startswith(" ") else text).replace(" ", SPACE))
    while len(symbols) > 1:
        best = max(range(len(symbols) - 1), key=lambda at: scores.get(symbols[at] + symbols[at + 1], float("-inf")))
        if symbols[best] + symbols[best + 1] not in scores:
            break
        symbols[best : best + 2] = [symbols[best] + symbols[best + 1]]
    known = [[ids[symbol]] if symbol in scores else [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()] for symbol in symbols]
    return [id for piece in known for id in piece]


def build(folder: Path, values: dict[str, Any]) -> Any:
    return gguf_tokenizer.build(gguf.GGUFReader(write_gguf(folder / "model.gguf", **values)))


@pytest.mark.parametrize("pre", EXPRESSIONS)
def test_each_pre_tokenizer_kind_splits_as_its_family_does(tmp_path: Path, pre: str) -> None:
    values = byte_level_values(pre=pre)
    tokenizer = build(tmp_path, values)
    for text in TEXTS:
        assert tokenizer.encode(text, add_special_tokens=False).ids == naive_bpe(values, text), text


def test_smollm_sets_digits_apart_before_words_are_cut(tmp_path: Path) -> None:
    smollm, gpt2 = (build(tmp_path, byte_level_values(pre=pre)) for pre in ("smollm", "gpt-2"))
    assert smollm.encode(" 123").tokens == ["Ġ", "1", "2", "3"]
    assert gpt2.encode(" 123").tokens != smollm.encode(" 123").tokens


def test_whole_words_need_no_merges_where_the_family_says_so(tmp_path: Path) -> None:
    for pre, expected in {"llama-bpe": ["zebra"], "smaug-bpe": list("zebra")}.items():
        values = byte_level_values(pre=pre)
        values["tokens"].append("zebra")
        values["token_type"].append(gguf.TokenType.NORMAL)
        assert build(tmp_path, values).encode("zebra").tokens == expected


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_joins_by_score_and_falls_back_to_bytes(tmp_path: Path, prefix: bool) -> None:
    values = sentencepiece_values(prefix=prefix)
    tokenizer = build(tmp_path, values)
    for text in ["hello world", " hello", "  hellohello  world", "é日🙂", "held or word", "<s >", "12,3.\n\nhe'll", "s>/s>"]:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == naive_sentencepiece(values, text), text
        assert tokenizer.decode(ids) == (text.removeprefix(" ") if prefix else text)


def test_control_tokens_are_special_and_user_defined_ones_are_not(tmp_path: Path) -> None:
    tokenizer = build(tmp_path, byte_level_values(user=("<think>", "   ")))
    added = {token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()}
    assert added == {"<|endoftext|>": True, "<|im_start|>": True, "<|im_end|>": True, "<think>": False, "   ": False}
    ids = tokenizer.encode("a<|im_end|>b<think>").ids
    assert ids[1] == 2 and tokenizer.id_to_token(ids[-1]) == "<think>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab<think>"


def test_no_merge_makes_a_control_token(tmp_path: Path) -> None:
    values = sentencepiece_values()  # "</s>" is "<" and "/s>", both pieces
    assert ("<", "/s>") not in gguf_tokenizer._merges(values["tokens"], values["token_type"], values["scores"])


BAD = {
    "unknown kind of model": ({"model": "wordpiece"}, "gpt2, llama; the file says 'wordpiece'"),
    "unknown pre-tokenizer": ({"pre": "klingon"}, "qwen2.*smollm.*the file says 'klingon'"),
    "no tokens": ({"tokens": None}, "tokenizer.ggml.tokens"),
    "no merges": ({"merges": None}, "tokenizer.ggml.merges"),
    "types too few": ({"token_type": [1, 1]}, "token_type for each of [0-9]+ tokens, got 2"),
    "tokens twice": ({"tokens": ["a", "b", "a"], "token_type": [1, 1, 1]}, "distinct"),
    "tokens of another type": ({"tokens": [1, 2, 3]}, "distinct|tokens"),
    "merge of unknown tokens": ({"merges": ["q1 q2"]}, "merges of tokens in the vocabulary"),
    "merge that is no pair": ({"merges": ["abc"]}, "two tokens with a space between, got 'abc'"),
    "pre of another type": ({"pre": True}, "pre to be a str, the file has a bool"),
}


@pytest.mark.parametrize("fault", BAD)
def test_metadata_that_cannot_be_right_is_refused(tmp_path: Path, fault: str) -> None:
    change, message = BAD[fault]
    values = {key: value for key, value in {**byte_level_values(), **change}.items() if value is not None}
    with pytest.raises(ModelError, match=message):
        build(tmp_path, values)


def test_scores_too_few_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="scores for each of"):
        build(tmp_path, sentencepiece_values() | {"scores": [0.5]})


@pytest.mark.slow
def test_the_default_models_tokenizer_is_the_one_it_was_trained_with() -> None:
    """Ids as published for SmolLM2's tokenizer."""
    from engine.weights import gguf_tokenizer
    from engine.weights.cache import default_cache_dir
    from engine.weights.fetch import resolve

    tokenizer = gguf_tokenizer.build(gguf.GGUFReader(resolve("default", default_cache_dir())))
    expected = {
        "Hello, we can use": [19556, 28, 392, 416, 722],
        "Hello world! 123": [19556, 905, 17, 216, 33, 34, 35],
        "Café déjà vu.": [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30],
        "  multiple   spaces": [216, 2701, 256, 5600],
    }
    assert {text: tokenizer.encode(text).ids for text in expected} == expected
