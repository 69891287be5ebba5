"""A JSON object, read character by character as it streams.

Owns: what is JSON and what is not, told at the first character that is not. Keeps the text of the object's own members, reads no
meaning into them. Pure: the standard library alone.
"""

from __future__ import annotations

import json
import re

BLANKS = " \t\r\n"  # JSON's
DEEPEST = 128  # nested objects and arrays: more is refused, so that whoever reads what was read need not fear for their stack


_DECODER = json.JSONDecoder(parse_constant=lambda name: _refuse(name))
_QUOTED = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_NO_BRACKET = re.compile(r"[^][{}]+")
_ALIKE = str.maketrans("[]{}", "()()")


def end_of_object(text: str, start: int) -> int:
    """Where the JSON object that begins at `start` ends; 0 if it is not whole, or `JsonObject` may not take it. Far quicker than that."""
    try:
        value, end = _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return 0
    if not isinstance(value, dict):
        return 0
    brackets = _NO_BRACKET.sub("", _QUOTED.sub("", text[start:end])).translate(_ALIKE)
    for _ in range(DEEPEST - 1):  # around it there is another object
        brackets = brackets.replace("()", "")
    return 0 if brackets else end


def _refuse(name: str) -> None:
    raise ValueError(f"expected JSON, got {name}")


class JsonObject:
    """Reads a JSON object in runs of characters, after blanks, and keeps the text of its members.

    Of those of the same name the first counts. Takes no character that could not go on as JSON.
    """

    _STRING = re.compile(r'[^"\\\x00-\x1f]+')
    _SCALAR = re.compile(r"true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
    _SCALARS = frozenset("0123456789+-.eEtrufalsn")
    _HEX = frozenset("0123456789abcdefABCDEF")

    def __init__(self) -> None:
        self.members: dict[str, str] = {}  # JSON text by name
        self.ended = False
        self._wanted = "value"
        self._stack: list[str] = []  # the closing brackets to come
        self._scalar: list[str] = []
        self._digits = 0  # of a \u escape, to come
        self._is_key = False  # the string being read
        self._kept: list[str] | None = None  # the outermost object's key or value being read
        self.key = ""
        self.opened = False  # the last character began the value of a member that is an object

    @property
    def depth(self) -> int:
        return len(self._stack)

    def take(self, text: str, start: int) -> int:
        """How many of the characters of `text` at `start` belong to the object; 0: the next does not."""
        self.opened = False
        in_string = self._wanted in ("string", "escape", "hex")
        taken = self._take_in_string(text, start) if in_string else self._take_outside(text[start])
        if taken and self._kept is not None:
            self._kept.append(text[start : start + taken])
            if self._wanted in ("colon", "next") and self.depth == 1:
                self._keep()
        return taken

    def _keep(self) -> None:
        kept = "".join(self._kept or ())
        self._kept = None
        if self._wanted == "colon":
            self.key = json.loads(kept)
        else:
            self.members.setdefault(self.key, kept)

    def _take_in_string(self, text: str, start: int) -> int:
        character = text[start]
        if self._wanted == "string":
            if run := self._STRING.match(text, start):
                return run.end() - start
            if character == '"':
                self._wanted = "colon" if self._is_key else "next"
            elif character == "\\":
                self._wanted = "escape"
            else:
                return 0
        elif self._wanted == "escape" and character == "u":
            self._wanted, self._digits = "hex", 4
        elif self._wanted == "escape" and character in '"\\/bfnrt':
            self._wanted = "string"
        elif self._wanted == "hex" and character in self._HEX:
            self._digits -= 1
            self._wanted = "hex" if self._digits else "string"
        else:
            return 0
        return 1

    def _take_outside(self, character: str) -> int:
        if self._wanted == "scalar":
            if character in self._SCALARS:
                self._scalar.append(character)
                return 1
            if not self._SCALAR.fullmatch("".join(self._scalar)):
                return 0
            self._wanted = "next"
            if self.depth == 1:
                self._keep()
        if character in BLANKS:
            return 1
        match self._wanted, character:
            case "value" | "first value" | "key" | "first key", '"' if self._stack:
                self._is_key = self._wanted.endswith("key")
                self._wanted = "string"
                self._keep_from_here()
            case (("value" | "first value"), "{"):
                self._keep_from_here()
                self.opened = self.depth == 1
                return self._open("}", "first key")
            case (("value" | "first value"), "[") if self._stack:
                self._keep_from_here()
                return self._open("]", "first value")
            case (("value" | "first value"), _) if self._stack and character in self._SCALARS:
                self._scalar, self._wanted = [character], "scalar"
                self._keep_from_here()
            case "colon", ":":
                self._wanted = "value"
            case "next", ",":
                self._wanted = "key" if self._stack[-1] == "}" else "value"
            case ("next", "}" | "]") | ("first key", "}") | ("first value", "]") if character == self._stack[-1]:
                self._stack.pop()
                self._wanted = "next"
                self.ended = not self._stack
            case _:
                return 0
        return 1

    def _open(self, closing: str, wanted: str) -> int:
        if self.depth == DEEPEST:
            return 0
        self._stack.append(closing)
        self._wanted = wanted
        return 1

    def _keep_from_here(self) -> None:
        if self.depth == 1:
            self._kept = []
