"""Small made-up tokenizers for tests of the text side: a few merges over bytes, and a SentencePiece-like one with scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
from gguf import TokenType

from engine.tokenizer import Tokenizer
from engine.weights import gguf_tokenizer

WORDS = ["the", "hello", "world", "don't", " 12", " a", "def", "\n\n", "  ", "12", "123", "日本", "é", "'s", "im", "end", "//"]
CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SPACE = gguf_tokenizer.SPACE


def byte_alphabet() -> dict[int, str]:
    """GPT-2's spelling of bytes, by its published rule: printable Latin-1 as it is, the others counted up from U+0100."""
    kept = [byte for byte in range(256) if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174]
    others = [byte for byte in range(256) if byte not in kept]
    return {byte: chr(byte) for byte in kept} | {byte: chr(256 + index) for index, byte in enumerate(others)}


def spelled(text: str) -> str:
    alphabet = byte_alphabet()
    return "".join(alphabet[byte] for byte in text.encode())


def merges_of(words: list[str]) -> list[tuple[str, str]]:
    """Merges that build each word from the left."""
    merges: list[tuple[str, str]] = []
    for word in map(spelled, words):
        for cut in range(1, len(word)):
            if (word[:cut], word[cut]) not in merges:
                merges.append((word[:cut], word[cut]))
    return merges


def write_gguf(path: Path, **values: Any) -> Path:
    """A GGUF file of tokenizer metadata alone. `values`: tokenizer.ggml keys without that prefix."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in values.items():
        name = f"tokenizer.ggml.{key}"
        match value:
            case bool():
                writer.add_bool(name, value)
            case str():
                writer.add_string(name, value)
            case _:
                writer.add_array(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def byte_level_values(control: tuple[str, ...] = CHATML, user: tuple[str, ...] = (), pre: str = "smollm") -> dict[str, Any]:
    """Metadata of a byte-level BPE: control tokens first, then bytes, then merges."""
    merges = merges_of(WORDS)
    plain = [*byte_alphabet().values(), *dict.fromkeys(left + right for left, right in merges)]
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": [*control, *plain, *user],
        "token_type": [TokenType.CONTROL] * len(control) + [TokenType.NORMAL] * len(plain) + [TokenType.USER_DEFINED] * len(user),
        "merges": [f"{left} {right}" for left, right in merges],
    }


def sentencepiece_values(control: tuple[str, ...] = ("<s>", "</s>"), prefix: bool = True) -> dict[str, Any]:
    """Metadata of a SentencePiece-like BPE: <unk>, control tokens, bytes, then pieces, the best scored first."""
    words = [
        *(SPACE + word for word in ("hello", "world", "he", "h", "wor", "w")),
        "llo",
        "he",
        "ll",
        "or",
        "ld",
        "s>",
        "/s>",
        SPACE * 2 + "q",
        SPACE * 2,
    ]
    pieces = [*words, SPACE, *"abcdefghijklmnopqrstuvwxyz0123456789<>/[]|.,'\n"]
    return {
        "model": "llama",
        "pre": "default",
        "tokens": ["<unk>", *control, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces],
        "token_type": [TokenType.UNKNOWN, *[TokenType.CONTROL] * len(control), *[TokenType.BYTE] * 256, *[TokenType.NORMAL] * len(pieces)],
        "scores": [0.0] * (1 + len(control) + 256) + [-float(rank) for rank in range(len(pieces))],
        "add_space_prefix": prefix,
    }


def make(folder: Path, values: dict[str, Any]) -> Tokenizer:
    """The tokenizer of such metadata, by way of a GGUF file and a tokenizer.json in `folder`."""
    reader = gguf.GGUFReader(write_gguf(folder / "model.gguf", **values))
    path = folder / "tokenizer.json"
    gguf_tokenizer.build(reader).save(str(path))
    return Tokenizer(path, eos_ids=[2])
