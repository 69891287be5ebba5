"""Text that a chat template handles like any other, but that never becomes part of a control token.

Owns: the stand-ins. One character of each control token that a content spells, or may help to spell together with what is
written beside it, is exchanged for a private-use character, and back after the template's control tokens were found. Knows nothing
of chats or templates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from engine.tokenizer import Tokenizer


class Edges:
    """What the end or the beginning of a content may add to a control token that goes on beside it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokens = list(tokenizer.control)
        self._longest = max(map(len, self._tokens), default=0)
        self._prefixes = {token[:cut] for token in self._tokens for cut in range(1, len(token))}
        self._suffixes = {token[cut:] for token in self._tokens for cut in range(1, len(token))}
        self._any = tokenizer.control_is_normalized  # other spellings may become a token: take no edge for harmless

    def starts(self, text: str) -> bool:
        """The first character may be a control token's, of which the rest was written before or around this text."""
        if not text or self._any:
            return bool(text)
        if any(text[:cut] in self._suffixes for cut in range(1, min(len(text), self._longest) + 1)):
            return True
        return len(text) < self._longest and any(text in token for token in self._tokens)

    def ends(self, text: str) -> bool:
        """The last character may be a control token's that goes on in what is written after this text."""
        if not text or self._any:
            return bool(text)
        return any(text[-cut:] in self._prefixes for cut in range(1, min(len(text), self._longest) + 1))


class Mask:
    """Puts stand-ins into the contents of one prompt, and takes them out again.

    A stand-in stands for one character wherever it occurs, so a template may cut, repeat and move what it is given.
    """

    def __init__(self, tokenizer: Tokenizer, edges: Edges, private: Iterator[str]) -> None:
        self._tokenizer = tokenizer
        self._edges = edges
        self._private = private
        self._stand_ins: dict[str, str] = {}  # by the character they stand for

    def content(self, text: str) -> str:
        """`text` so that no part of it can become part of a control token."""
        return self.edged(self.spelled(text))

    def spelled(self, text: str) -> str:
        """`text` with a stand-in in each control token that it spells: always the same one in the same token."""
        while spans := self._tokenizer.spelled_control(text):  # again: tokens may overlap
            text = self._replace(text, [start + _indent(text[start:stop]) for start, stop in spans])
        return text

    def edged(self, text: str) -> str:
        """`text`, which spells no control token, so that it helps to spell none, nor does it without the blanks at its ends."""
        first, stop = _indent(text), len(text.rstrip())
        positions = set()
        for start, end in {(0, len(text)), (first, stop)} if first < stop else {(0, len(text))}:
            part = text[start:end]
            if self._edges.starts(part):
                positions.add(start)
            if self._edges.ends(part):
                positions.add(end - 1)
        return self._replace(text, sorted(positions))

    def undo(self, text: str) -> str:
        for character, stand_in in self._stand_ins.items():
            text = text.replace(stand_in, character)
        return text

    def _replace(self, text: str, positions: list[int]) -> str:
        parts, end = [], 0
        for position in positions:
            parts += [text[end:position], self._stand_in(text[position])]
            end = position + 1
        return "".join([*parts, text[end:]]) if parts else text

    def _stand_in(self, character: str) -> str:
        if character in self._stand_ins.values():
            return character
        if character not in self._stand_ins:
            self._stand_ins[character] = next(self._private)
        return self._stand_ins[character]


def _indent(text: str) -> int:
    """Characters before the first that is not blank; 0 if all are."""
    return len(text) - len(text.lstrip()) if text.strip() else 0


class Content(str):
    """A masked content that a template handles like the text it stands for.

    What a template looks for in it is masked alike, so `'</think>' in content` finds a spelled control token; and a text
    derived from it (a part, a trimmed or replaced text) is masked anew, at its new edges too.
    """

    __slots__ = ("_mask",)
    _mask: Mask

    def __new__(cls, masked: str, mask: Mask) -> Content:
        content = super().__new__(cls, masked)
        content._mask = mask
        return content

    def derive(self, result: Any) -> Any:
        """A filter's or method's result, if it is text, as a content."""
        if isinstance(result, Content):
            return result
        if isinstance(result, str):
            if result == self:
                return self
            part = str.__contains__(self, result)  # then it spells no control token either
            return Content(self._mask.edged(result) if part else self._mask.content(result), self._mask)
        if isinstance(result, list | tuple):
            return type(result)(map(self.derive, result))
        return result

    def _spell(self, argument: Any) -> Any:
        """What a template looks for, masked as it would be here."""
        if isinstance(argument, tuple):
            return tuple(map(self._spell, argument))
        return self._mask.spelled(argument) if type(argument) is str else argument


def _lifted(name: str) -> Callable[..., Any]:
    method = getattr(str, name)

    def call(self: Content, *arguments: Any, **options: Any) -> Any:
        return self.derive(method(self, *map(self._spell, arguments), **options))

    return call


_LOOKING = ("__contains__", "count", "endswith", "find", "index", "rfind", "rindex", "startswith")
_CUTTING = ("__getitem__", "lstrip", "partition", "removeprefix", "removesuffix", "rpartition", "rsplit", "rstrip", "split", "splitlines")
_CHANGING = ("capitalize", "casefold", "lower", "replace", "strip", "swapcase", "title", "upper")
for _name in (*_LOOKING, *_CUTTING, *_CHANGING):
    setattr(Content, _name, _lifted(_name))


class _Members(dict[str, Any]):
    """An object with masked names, in which a template finds its members by the names it knows them by."""

    def __init__(self, members: dict[str, Any], mask: Mask) -> None:
        super().__init__(members)
        self._mask = mask

    def __missing__(self, name: str) -> Any:
        if (spelled := self._mask.content(name)) != name:
            return self[spelled]
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and super().__contains__(self._mask.content(name)))

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default


def masked(value: Any, mask: Mask) -> Any:
    """JSON with each text in it, names too, as a content."""
    match value:
        case str():
            return Content(mask.content(value), mask)
        case dict():
            return _Members({masked(name, mask): masked(member, mask) for name, member in value.items()}, mask)
        case list():
            return [masked(item, mask) for item in value]
    return value
