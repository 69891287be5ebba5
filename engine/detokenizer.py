"""Generated tokens to text, one at a time, and the stop strings in it.

Owns: which text of a running reply may be shown. Knows nothing of requests, steps or sockets. Both classes take time linear
in the reply's length.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from engine.core import RequestError
from engine.tokenizer import Place, Tokenizer, strip_leading


class Detokenizer:
    """Text of tokens as they come. What `push` and `flush` return joins to `tokenizer.decode` of all the ids.

    A character shows when its last byte is there, so U+FFFD only ever shows where the bytes are truly not UTF-8.
    """

    __slots__ = ("_decoder", "_spaces", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._spaces = tokenizer.leading_spaces  # still to be taken off the front

    def push(self, id: int) -> str:
        return self._unspaced(self._decoder.decode(self._tokenizer.visible_bytes(id)))

    def flush(self) -> str:
        """The end of the text: U+FFFD if a character is incomplete."""
        return self._unspaced(self._decoder.decode(b"", final=True))

    @property
    def pending(self) -> bool:
        """The last token ended inside a character."""
        return bool(self._decoder.getstate()[0])

    def _unspaced(self, text: str) -> str:
        if not self._spaces or not text:
            return text
        rest = strip_leading(text, self._spaces)
        self._spaces = 0 if rest else self._spaces - len(text)
        return rest


class _StopString:
    """How much of one stop string the text's end spells, by Knuth, Morris and Pratt: constant time a character, amortised."""

    __slots__ = ("_borders", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0  # characters: the longest proper prefix of `text` that the text so far ends with; len(text): all of it
        self._borders = [0] * (len(text) + 1)  # of a prefix's length: the longest proper prefix of it that it also ends with
        border = 0
        for length in range(2, len(text) + 1):
            while border and text[border] != text[length - 1]:
                border = self._borders[border]
            border += text[border] == text[length - 1]
            self._borders[length] = border

    def feed(self, character: str) -> bool:
        """Whether `character` completes the stop string. Not to be fed again once it has."""
        matched = self.matched
        while matched and self.text[matched] != character:
            matched = self._borders[matched]
        self.matched = matched + (self.text[matched] == character)
        return self.matched == len(self.text)


class TextStream:
    """A reply's visible text: all text before the first stop string.

    The first is the one completed first, and of those completed by the same character the longest; so the outcome does not
    depend on how the text is cut into tokens. Text is held back only while it may still become a stop string.
    Raises: RequestError for an empty stop string.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        if not all(stop):
            raise RequestError("expected stop strings of at least one character, got an empty one", "stop")
        self.stopped = False
        self._flushed = False
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = [_StopString(text) for text in stop]
        self._held = ""  # text that may still become a stop string
        self._shown = 0  # characters
        self._ids: list[int] = []
        self._texts: list[str] = []  # of each id: the text it completed
        self._whole: list[bool] = []  # of each id: it ends on a character's edge

    @property
    def exact(self) -> bool:
        """The tokens so far decode to the text shown so far: no character is incomplete, and nothing is held back."""
        return not (self.stopped or self._held or self._detokenizer.pending)

    def push(self, id: int) -> str:
        """The text that is now safe to show; none after a stop."""
        if self.stopped:
            return ""
        text = self._detokenizer.push(id)
        self._ids.append(id)
        self._texts.append(text)
        self._whole.append(not self._detokenizer.pending)
        return self._advance(text)

    def flush(self) -> str:
        """The end of the reply: what was held back, if it did not become a stop string."""
        if self.stopped:
            return ""
        shown = self._advance(self._detokenizer.flush())
        if not self.stopped:
            shown += self._held
            self._shown += len(self._held)
            self._held = ""
        self._flushed = True
        return shown

    def visible_ids(self) -> list[int]:
        """Tokens whose text is the text shown so far: those generated, up to where it ends; all of them after a `flush` without a stop.

        Where that (a stop string's beginning) is inside a token, the few characters before it are encoded anew.
        """
        if self._flushed and not self.stopped:
            return list(self._ids)
        kept, length = len(self._ids), sum(map(len, self._texts))
        while kept and (length > self._shown or not self._whole[kept - 1]):
            kept -= 1
            length -= len(self._texts[kept])
        ids = self._ids[:kept]
        rest = "".join(self._texts[kept:])[: self._shown - length]
        if rest and not any(map(self._tokenizer.visible_bytes, ids)):
            rest = " " * self._tokenizer.leading_spaces + rest  # decoding will take them off
        return ids + self._tokenizer.encode_plain(rest, Place.INSIDE)

    def _advance(self, text: str) -> str:
        end = self._stop_in(text)
        buffer = self._held + text
        if end is None:
            safe = len(buffer) - max((stop.matched for stop in self._stops), default=0)
        else:
            matched = max(len(stop.text) for stop in self._stops if stop.matched == len(stop.text))
            safe = len(self._held) + end - matched
            self.stopped = True
        self._held = "" if self.stopped else buffer[safe:]
        self._shown += safe
        return buffer[:safe]

    def _stop_in(self, text: str) -> int | None:
        """Where in `text` the first stop string ends."""
        if not self._stops:
            return None
        for position, character in enumerate(text, 1):
            completed = [stop for stop in self._stops if stop.feed(character)]
            if completed:
                return position
        return None
