"""Builds a tokenizer from a GGUF file's own metadata.

Owns: what `tokenizer.ggml.*` means: vocabulary, merges or scores, token types, and the pre-tokenizer kinds with the exact
expressions of the tokenizers they stand for. Knows nothing of tensors or chat templates, and runs once per model: what it
builds is saved as a `tokenizer.json`, which is all that serving reads.

Sources: the GGUF specification (ggml, docs/gguf.md) for the keys; llama.cpp's `llama-vocab.cpp` for the names of
pre-tokenizers; each family's published `tokenizer.json` for its expressions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gguf import GGUFReader, TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from engine.core import ModelError

SPACE = "\u2581"  # how SentencePiece writes a space


@dataclass(slots=True, frozen=True)
class _Split:
    """One pre-tokenizer kind: how text is cut into words before merges are applied."""

    pattern: str | None = None  # None: GPT-2's own
    digits: bool = False  # digits are set apart one by one before that
    whole_words: bool = False  # a word found in the vocabulary is one token, whatever the merges say
    nfc: bool = False  # text is brought into Unicode's form NFC first


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_JOINT = r"[^\r\n\p{L}\p{N}]?"

_GPT2 = _Split()
_DIGITS = _Split(digits=True)
_LLAMA3 = rf"{_CONTRACTION}|{_JOINT}\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTION}|{_JOINT}\p{{L}}+|\p{{N}}|{_TAIL}"
_TEKKEN = rf"{_JOINT}{_UPPER}*{_LOWER}+|{_JOINT}{_UPPER}+{_LOWER}*|\p{{N}}|{_CASED_TAIL}"
_GPT4O = rf"{_JOINT}{_UPPER}*{_LOWER}+{_CONTRACTION}?|{_JOINT}{_UPPER}+{_LOWER}*{_CONTRACTION}?|\p{{N}}{{1,3}}|{_CASED_TAIL}"

SPLITS: dict[str, _Split] = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "olmo"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3"), _Split(_LLAMA3, whole_words=True)),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _Split(_LLAMA3)),
    **dict.fromkeys(("qwen2", "stablelm2"), _Split(_QWEN2, nfc=True)),
    "deepseek-r1-qwen": _Split(_QWEN2),
    "tekken": _Split(_TEKKEN, whole_words=True),
    **dict.fromkeys(("gpt-4o", "llama4"), _Split(_GPT4O)),
}


def build(reader: GGUFReader) -> Tokenizer:
    """The tokenizer that the file describes, its control tokens included.

    Raises: ModelError when a key is missing or contradicts another, or for a kind of tokenizer that is not supported.
    """
    kind = _value(reader, "model", str)
    match kind:
        case "gpt2":
            tokenizer = _byte_level(reader)
        case "llama":
            tokenizer = _sentencepiece(reader)
        case _:
            raise ModelError(f"expected tokenizer.ggml.model to be one of gpt2, llama; the file says {kind!r}")
    _add_tokens(tokenizer, reader)
    return tokenizer


def _byte_level(reader: GGUFReader) -> Tokenizer:
    kind = _value(reader, "pre", str, default="default")
    split = SPLITS.get(kind)
    if split is None:
        raise ModelError(f"expected tokenizer.ggml.pre to be one of {', '.join(sorted(SPLITS))}; the file says {kind!r}")
    merges = []
    for line in _value(reader, "merges", list):
        left, space, right = line.partition(" ")
        if not (left and space and right) or " " in right:
            raise ModelError(f"expected each of tokenizer.ggml.merges to be two tokens with a space between, got {line!r}")
        merges.append((left, right))
    tokenizer = Tokenizer(_bpe(_vocabulary(reader), merges, ignore_merges=split.whole_words))
    words: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split.digits else []
    if split.pattern is not None:
        words.append(pre_tokenizers.Split(Regex(split.pattern), behavior="isolated"))
    words.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(words)
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(reader: GGUFReader) -> Tokenizer:
    tokens, types = _vocabulary(reader), _types(reader)
    scores = _value(reader, "scores", list)
    if len(scores) != len(types):
        raise ModelError(f"expected one of tokenizer.ggml.scores for each of {len(types)} tokens, got {len(scores)}")
    unknown = next((token for token, kind in zip(_tokens(reader), types, strict=True) if kind == TokenType.UNKNOWN), None)
    model = _bpe(tokens, _merges(_tokens(reader), types, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    prefix = _value(reader, "add_space_prefix", bool, default=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first" if prefix else "never", split=False)
    parts: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        parts.append(decoders.Strip(content=" ", left=1))
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def _merges(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose joint piece scores best: the same as merges in the order of those scores.

    Only ordinary pieces take part, so that no merge makes a control or byte token.
    """
    score = {token: value for token, kind, value in zip(tokens, types, scores, strict=True) if kind == TokenType.NORMAL}
    pairs = [
        (value, cut, len(token) - cut, token)
        for token, value in score.items()
        for cut in range(1, len(token))
        if token[:cut] in score and token[cut:] in score
    ]
    pairs.sort(key=lambda pair: pair[:3], reverse=True)
    return [(token[:cut], token[cut:]) for _, cut, _, token in pairs]


def _add_tokens(tokenizer: Tokenizer, reader: GGUFReader) -> None:
    """Control tokens are special (never part of visible text); user-defined ones are matched whole, but visible."""
    special = (TokenType.CONTROL, TokenType.UNKNOWN)
    pairs = list(zip(_tokens(reader), _types(reader), strict=True))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token, kind in pairs if kind in special])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token, kind in pairs if kind == TokenType.USER_DEFINED])


def _bpe(vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocab=vocabulary, merges=merges, **options)
    except Exception as fault:  # the library raises bare Exception for a merge of tokens it does not have
        raise ModelError(f"expected merges of tokens in the vocabulary: {fault}") from fault


def _tokens(reader: GGUFReader) -> list[str]:
    tokens: list[str] = _value(reader, "tokens", list)
    return tokens


def _vocabulary(reader: GGUFReader) -> dict[str, int]:
    tokens = _tokens(reader)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if not tokens or len(vocabulary) != len(tokens):
        raise ModelError(f"expected tokenizer.ggml.tokens to be distinct texts, got {len(tokens)} of which {len(vocabulary)} differ")
    return vocabulary


def _types(reader: GGUFReader) -> list[int]:
    count = len(_tokens(reader))
    types: list[int] = _value(reader, "token_type", list)
    if len(types) != count:
        raise ModelError(f"expected one of tokenizer.ggml.token_type for each of {count} tokens, got {len(types)}")
    return types


def _value(reader: GGUFReader, key: str, kind: type, default: Any = None) -> Any:
    field = reader.fields.get(f"tokenizer.ggml.{key}")
    if field is None:
        if default is None:
            raise ModelError(f"expected the key tokenizer.ggml.{key} in the GGUF file, found none")
        return default
    try:
        value = field.contents()
    except UnicodeDecodeError as fault:
        raise ModelError(f"expected tokenizer.ggml.{key} to be UTF-8: {fault}") from fault
    if not isinstance(value, kind):
        raise ModelError(f"expected tokenizer.ggml.{key} to be a {kind.__name__}, the file has a {type(value).__name__}")
    return value
