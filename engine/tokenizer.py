"""Text to token ids and back, with control tokens kept apart from text.

Owns: the rule that text is only text. `encode_plain` never yields a control token, whatever the text spells; only
`split_control`, meant for a chat template's own words, finds them. Also the exact bytes of every token. Knows nothing of
chats, models or requests. The `tokenizers` library does the work, always through its batch calls: they, unlike `encode`,
release the GIL, so the event loop runs while a long text is encoded.
"""

from __future__ import annotations

import enum
import hashlib
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

# Read by the library at every batch call: without it the first one starts a pool of threads that outlives the call.
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import tokenizers

from engine.core import ModelError, RequestError


class Place(enum.Enum):
    """Where a piece of plain text stands. Vocabularies in the manner of SentencePiece begin some of them with a space."""

    START = "start"  # nothing before it
    SECTION = "section"  # right after a control token
    INSIDE = "inside"  # right after tokens of other text


class Tokenizer:
    """A model's tokenizer.

    `path` is a `tokenizer.json`; `eos_ids` are the tokens that end a reply.
    Raises: ModelError when the file cannot be read, or is of a kind whose tokens have no exact bytes.
    """

    def __init__(self, path: str | Path, eos_ids: Iterable[int] = ()) -> None:
        try:
            canonical = tokenizers.Tokenizer.from_file(str(path)).to_str()
        except Exception as fault:  # the library raises bare Exception
            raise ModelError(f"expected {Path(path).name} to be a tokenizer.json: {fault}") from fault
        spec = {**json.loads(canonical), "truncation": None, "padding": None, "post_processor": None}
        added = spec["added_tokens"]
        control = [token for token in added if token["special"] or token["content"].strip()]  # runs of blanks are mere vocabulary
        plain = [token for token in added if token not in control]

        self.path = Path(path)
        self.eos_ids = frozenset(eos_ids)
        self.control: Mapping[str, int] = {token["content"]: token["id"] for token in control}
        self.special_ids = frozenset(token["id"] for token in added if token["special"])  # never part of visible text
        self.control_is_normalized = any(token["normalized"] for token in control) and spec["normalizer"] is not None
        self._control_ids = frozenset(self.control.values())
        self._added = {token["id"]: token["content"] for token in added}
        self._unknown = spec["model"].get("unk_id", self.control.get(spec["model"].get("unk_token")))
        self._digest = hashlib.sha256(f"{canonical}\n{sorted(self.eos_ids)}".encode()).hexdigest()

        self._splitter = _splitter(spec, control)
        flags = [{**token, "single_word": False} for token in control]
        self._finder = self._splitter if flags == control else _splitter(spec, flags)
        self._splitter_ids = [token["id"] for token in control]
        self._plain = _plain_encoders({**spec, "added_tokens": plain})
        start = self._plain[Place.START]
        # The library numbers added tokens anew when others before them are left out.
        self._renumbered = {start.token_to_id(token["content"]): token["id"] for token in plain}
        self._renumbered = {theirs: ours for theirs, ours in self._renumbered.items() if theirs != ours}
        self.vocab_size = 1 + max([*start.get_vocab(with_added_tokens=False).values(), *self._added])
        self.longest = _longest(spec, start, self._unknown)  # characters that one token stands for, at the most
        self._spelling = _Spelling(spec["decoder"])
        self.leading_spaces = self._spelling.leading_spaces  # spaces that decoding takes off the front of a text
        self._bytes: dict[int, bytes] = {}

    def digest(self) -> str:
        """SHA-256, in hex, of all that decides which ids a text becomes."""
        return self._digest

    def encode_plain(self, text: str, place: Place = Place.START) -> list[int]:
        """Token ids of `text` as ordinary text, without BOS or EOS.

        Text that spells no control token encodes as the whole tokenizer would; what spells one is encoded letter by
        letter, as it were. Raises: RequestError for text that is not Unicode (a lone surrogate), or that holds a character
        which this model knows only as a control token.
        """
        check_text(text)
        if not text:
            return []
        ids = self._plain[place].encode_batch_fast([text], add_special_tokens=False)[0].ids
        if self._renumbered:
            ids = [self._renumbered.get(id, id) for id in ids]
        return ids if self._control_ids.isdisjoint(ids) else self._encode_in_parts(text, place)

    def _encode_in_parts(self, text: str, place: Place) -> list[int]:
        """Some vocabularies (Unigram, or BPE that takes whole words) reach a control token from plain text: cut it in two."""
        encoding = self._plain[place].encode_batch([text], add_special_tokens=False)[0]
        ids = [self._renumbered.get(id, id) for id in encoding.ids]
        cuts = [0]
        for id, (start, stop) in zip(ids, encoding.offsets, strict=True):
            if id not in self._control_ids:
                continue
            content = self._added[id]
            if id == self._unknown and text[start:stop].strip() != content:
                continue  # a character that the vocabulary does not have, not the token's own spelling
            if stop - start < 2:
                raise RequestError(f"expected text that this model can read, got {text[start:stop]!r}, to it the control token {content!r}")
            cuts.append((start + stop) // 2)
        if len(cuts) == 1:
            return ids
        cuts.append(len(text))
        parts = [text[start:stop] for start, stop in itertools.pairwise(cuts)]
        return [*self.encode_plain(parts[0], place), *(id for part in parts[1:] for id in self.encode_plain(part, Place.INSIDE))]

    def split_control(self, text: str) -> list[str | int]:
        """`text` as control tokens' ids and the plain text between them, as the library finds them: leftmost, then longest.

        In order; no text is empty, no two stand side by side. Blanks that a token's `lstrip` or `rstrip` flag takes in are
        part of the token.
        """
        pieces: list[str | int] = []
        end = 0
        for start, stop, id in self._spans(self._splitter, text):
            if start > end:
                pieces.append(text[end:start])
            pieces.append(id)
            end = stop
        if end < len(text):
            pieces.append(text[end:])
        return pieces

    def spelled_control(self, text: str) -> list[tuple[int, int]]:
        """(start, stop) of each control token that `text` spells, `single_word` ones inside words too; none if there are none.

        Of tokens that overlap only the first is found.
        """
        return [(start, stop) for start, stop, _ in self._spans(self._finder, text)]

    def _spans(self, splitter: tokenizers.Tokenizer, text: str) -> list[tuple[int, int, int]]:
        check_text(text)
        encoding = splitter.encode_batch([text], add_special_tokens=False)[0]
        found = zip(encoding.ids, encoding.offsets, strict=True)
        return [(start, stop, self._splitter_ids[id - 1]) for id, (start, stop) in found if id]

    def token_bytes(self, id: int) -> bytes:
        """The exact bytes that token `id` stands for in a text, a control token's spelling included; none for an unused id."""
        known = self._bytes.get(id)
        if known is None:
            if id in self._added:
                known = self._added[id].encode()
            else:
                token = self._plain[Place.START].id_to_token(id) if id >= 0 else None
                known = b"" if token is None else self._spelling.bytes_of(token)
            self._bytes[id] = known
        return known

    def visible_bytes(self, id: int) -> bytes:
        """`token_bytes`, but none for special tokens: what the token adds to a text that people read."""
        return b"" if id in self.special_ids else self.token_bytes(id)

    def decode(self, ids: Iterable[int]) -> str:
        """The text that people read. Bytes that are not UTF-8 become U+FFFD, one for each maximal run, as Unicode recommends."""
        text = b"".join(map(self.visible_bytes, ids)).decode(errors="replace")
        return strip_leading(text, self.leading_spaces)


def check_text(text: str) -> None:
    """Raises: RequestError when `text` holds half of a surrogate pair, which no encoding of Unicode can carry."""
    try:
        text.encode()
    except UnicodeEncodeError as fault:
        raise RequestError(f"expected Unicode text, got the lone surrogate {text[fault.start]!r} at character {fault.start}") from fault


def strip_leading(text: str, spaces: int) -> str:
    """`text` without up to `spaces` spaces at its front."""
    while spaces and text.startswith(" "):
        text, spaces = text[1:], spaces - 1
    return text


Spec = dict[str, Any]  # a part of a tokenizer.json


def _longest(spec: Spec, encoder: tokenizers.Tokenizer, unknown: int | None) -> int:
    """A bound: a token is at least as long, in characters, as the text it stands for, unless one `unknown` token may stand for any."""
    if unknown is not None and not spec["model"].get("byte_fallback"):
        return sys.maxsize
    composed = 1 if spec["normalizer"] is None else 4  # a normaliser may make one character of several
    return composed * max(map(len, encoder.get_vocab()))


def _splitter(spec: Spec, control: list[Spec]) -> tokenizers.Tokenizer:
    """A tokenizer to which all text between control tokens is one unknown word, of id 0; the nth control token has id n + 1."""
    numbered = [{**token, "id": number} for number, token in enumerate(control, 1)]
    word = {"type": "WordLevel", "vocab": {"\0": 0}, "unk_token": "\0"}
    return _load({**spec, "model": word, "pre_tokenizer": None, "decoder": None, "added_tokens": numbered})


def _plain_encoders(spec: Spec) -> dict[Place, tokenizers.Tokenizer]:
    """One encoder for each place; places that need nothing different share one."""
    built: list[tuple[Spec, tokenizers.Tokenizer]] = []
    encoders = {}
    for place in Place:
        variant = {**spec, **{key: _placed(spec[key], place) for key in ("normalizer", "pre_tokenizer")}}
        encoder = next((encoder for known, encoder in built if known == variant), None)
        if encoder is None:
            encoder = _load(variant)
            built.append((variant, encoder))
        encoders[place] = encoder
    return encoders


def _placed(part: Spec | None, place: Place) -> Spec | None:
    """A normalizer or pre-tokenizer as it works at `place`: without the leading space that it adds only elsewhere."""
    if part is None or place is Place.START:
        return part
    match part["type"]:
        case "Sequence":
            key = "normalizers" if "normalizers" in part else "pretokenizers"
            return {**part, key: [kept for child in part[key] if (kept := _placed(child, place)) is not None]}
        case "Metaspace" if part["prepend_scheme"] == "first" or place is Place.INSIDE:
            return {**part, "prepend_scheme": "never"}
        case "ByteLevel" if place is Place.INSIDE:
            return {**part, "add_prefix_space": False}
        case "Prepend" if place is Place.INSIDE:
            return None
    return part


def _load(spec: Spec) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(json.dumps(spec))


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable character: itself where Latin-1 has one, else from U+0100 upwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + number): byte for number, byte in enumerate(hidden)}


class _Spelling:
    """How a vocabulary writes bytes, read from the `decoder` of its tokenizer.json."""

    _ALPHABET = _byte_alphabet()
    _BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")

    def __init__(self, decoder: Spec | None) -> None:
        self.leading_spaces = 0
        self._steps: list[Callable[[str], str | bytes]] = []
        fused = False
        for part in (decoder or {}).get("decoders", [decoder]):
            match part:
                case {"type": "ByteLevel"}:
                    self._steps.append(self._byte_level)
                case {"type": "ByteFallback"}:
                    self._steps.append(self._byte_fallback)
                case {"type": "Replace", "pattern": {"String": old}, "content": new} if not fused:
                    self._steps.append(self._replacing(old, new))
                case {"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme}:
                    self._steps.append(self._replacing(mark, " "))
                    self.leading_spaces = int(scheme != "never")
                case {"type": "Fuse"}:
                    fused = True
                case {"type": "Strip", "content": " ", "start": start, "stop": 0} if fused:
                    self.leading_spaces = start
                case _:
                    raise ModelError(f"expected a byte-level, byte-fallback or Metaspace decoder in tokenizer.json, got {part!r}")

    def bytes_of(self, token: str) -> bytes:
        for step in self._steps:
            result = step(token)
            if isinstance(result, bytes):
                return result
            token = result
        return token.encode()

    @staticmethod
    def _replacing(old: str, new: str) -> Callable[[str], str]:
        return lambda token: token.replace(old, new)

    @classmethod
    def _byte_level(cls, token: str) -> bytes:
        try:
            return bytes(cls._ALPHABET[character] for character in token)
        except KeyError:
            return token.encode()  # a token outside the alphabet spells itself

    @classmethod
    def _byte_fallback(cls, token: str) -> str | bytes:
        byte = cls._BYTE.fullmatch(token)
        return bytes.fromhex(byte[1]) if byte else token
