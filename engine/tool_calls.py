"""The text of a model's calls of tools: how it is written, and read back while it streams.

Owns: the markup (the Hermes form, which Qwen and others are trained on) and its incremental parser. Knows nothing of models, templates,
protocols and grammars (`tool_grammar.py`), nor which tools exist. Pure: the standard library alone.

A call is OPEN, blanks, and a JSON object with a name and arguments; the CLOSE after it is its own, and is not missed. Whatever is
not such a call is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from engine.core import RequestError, Tool
from engine.json_object import BLANKS, JsonObject, end_of_object

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
MOST_CALLS = 16  # in one reply, by grammar: a small model that repeats itself comes to an end

_ARGUMENTS = ("arguments", "parameters")  # what models call them
_UP_TO_ARGUMENTS = re.compile(
    r'[ \t\r\n]*\{[ \t\r\n]*"name"[ \t\r\n]*:[ \t\r\n]*("(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*")[ \t\r\n]*,[ \t\r\n]*'
    rf'"(?:{"|".join(_ARGUMENTS)})"[ \t\r\n]*:[ \t\r\n]*(?=\{{)'
)
_AFTER_ARGUMENTS = re.compile(r"[ \t\r\n]*\}")


@dataclass(slots=True, frozen=True)
class Said:
    """Text that is part of no call."""

    text: str


@dataclass(slots=True, frozen=True)
class CallBegun:
    index: int  # counts the reply's calls from 0
    name: str


@dataclass(slots=True, frozen=True)
class CallArguments:
    """More of the arguments of the call last begun."""

    index: int
    text: str  # JSON, verbatim; all of a whole call's are an object


@dataclass(slots=True, frozen=True)
class CallEnded:
    index: int
    whole: bool  # its arguments are a JSON object; False: broken off, by the end of the reply or by what is no JSON


Piece = Said | CallBegun | CallArguments | CallEnded


@dataclass(slots=True, frozen=True)
class Call:
    name: str
    arguments: str  # a JSON object, as text


def call_text(name: str, arguments: str) -> str:
    """A call as a reply holds it; a reply's calls are joined with a line's end. `arguments`: JSON text; none at all: no arguments."""
    return f'{OPEN}\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {arguments.strip() or "{}"}}}\n{CLOSE}'


def parse(text: str) -> list[Piece]:
    """All pieces of a whole reply, merged."""
    parser = ToolCallParser()
    return merged([*parser.feed(text), *parser.end()])


def whole_calls(text: str) -> list[Call]:
    """The calls of a reply that were not broken off."""
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    calls = []
    for piece in parse(text):
        match piece:
            case CallBegun(index, name):
                names[index] = name
            case CallArguments(index, part):
                arguments[index] = part
            case CallEnded(index, True):
                calls.append(Call(names[index], arguments[index]))
    return calls


def said(text: str) -> str:
    """A reply without its calls. What stood between them is joined with a line's end."""
    return "\n".join(piece.text for piece in parse(text) if isinstance(piece, Said))


def merged(pieces: Iterable[Piece]) -> list[Piece]:
    """`pieces` with neighbouring texts, and neighbouring parts of one call's arguments, as one."""
    runs: list[list[Piece]] = []
    for piece in pieces:
        if runs and type(runs[-1][0]) is type(piece) and isinstance(piece, Said | CallArguments):
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return [_joined(run) for run in runs]


def _joined(run: list[Piece]) -> Piece:
    first = run[0]
    if len(run) == 1 or not isinstance(first, Said | CallArguments):
        return first
    return replace(first, text="".join(piece.text for piece in run if isinstance(piece, Said | CallArguments)))


class ToolCallParser:
    """Tells a reply's calls from its text, piece by piece, as it streams. What comes out does not hang on how the text is cut.

    Blanks between text and calls are not said. Text is held back only while it may be a call's beginning, or blanks before one.
    Takes time linear in the text.
    """

    def __init__(self) -> None:
        self._read = self._read_text
        self._pieces: list[Piece] = []
        self._index = 0  # of the next call
        self._after_call = False  # nothing was said since
        self._blanks: list[str] = []  # not said: a call may follow
        self._partial = ""  # of a mark: not said, for the rest of it may follow
        self._held: list[str] = []  # of what may be a call, from OPEN on; once it has begun, of what follows its arguments
        self._object = JsonObject()

    def feed(self, text: str) -> list[Piece]:
        """What `text`, the next part of the reply, makes known."""
        start = 0
        while start < len(text):
            start = self._read(text, start)
        return self._told()

    def end(self) -> list[Piece]:
        """What the end of the reply makes known. Nothing can be fed after it."""
        if self._read == self._read_arguments:
            self._break_off()
        elif self._read == self._read_call:
            self._say_held()
        if self._read != self._read_close:
            self._say(self._partial)
            if self._blanks and not self._index:  # a reply without calls is said as it is
                self._pieces.append(Said("".join(self._blanks)))
        return self._told()

    def _told(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return merged(pieces)

    def _say(self, text: str) -> None:
        """`text` and the blanks before it, unless a call is before them; not yet the blanks at its end."""
        if visible := text.rstrip(BLANKS):
            before = "" if self._after_call else "".join(self._blanks)
            shown = visible.lstrip(BLANKS) if self._after_call else visible
            self._pieces.append(Said(before + shown))
            self._after_call = False
            self._blanks = []
        if len(visible) < len(text):
            self._blanks.append(text[len(visible) :])

    # Each of these reads on in `text` from `start`, in one state, and returns where it stopped.

    def _read_text(self, text: str, start: int) -> int:
        before = len(self._partial)
        text = self._partial + text[start:]
        self._partial = ""
        if (found := text.find(OPEN)) >= 0:
            self._say(text[:found])
            self._held, self._object, self._read = [OPEN], JsonObject(), self._read_call
            return start + found + len(OPEN) - before
        kept = next(cut for cut in range(min(len(OPEN) - 1, len(text)), -1, -1) if text.endswith(OPEN[:cut]))
        self._say(text[: len(text) - kept])
        self._partial = OPEN[:kept]
        return start + len(text) - before

    def _read_call(self, text: str, start: int) -> int:
        """After OPEN, until its arguments begin, or all of it is known."""
        if len(self._held) == 1 and (end := self._take_whole(text, start)):
            return end
        while start < len(text):
            taken = self._object.take(text, start)
            if not taken:
                self._say_held()
                return start
            self._held.append(text[start : start + taken])
            start += taken
            if self._object.ended:
                self._end_unordered()
                return start
            if name := _name_before_arguments(self._object):
                self._begin(name)
                self._pieces.append(CallArguments(self._index, "{"))
                self._read = self._read_arguments
                return start
        return start

    def _take_whole(self, text: str, start: int) -> int:
        """A call as most are written, where all of it is at hand: its end, else 0. Reading it character by character takes far longer."""
        head = _UP_TO_ARGUMENTS.match(text, start)
        end = end_of_object(text, head.end()) if head else 0
        tail = _AFTER_ARGUMENTS.match(text, end) if end else None
        name = _text(head[1]) if head and tail else None
        if not (head and tail and name):
            return 0
        self._begin(name)
        self._pieces.append(CallArguments(self._index, text[head.end() : end]))
        self._end(whole=True)
        return tail.end()

    def _read_arguments(self, text: str, start: int) -> int:
        """After the beginning of the arguments, until the object around them ends."""
        while start < len(text):
            inside = self._object.depth > 1
            taken = self._object.take(text, start)
            if not taken:
                self._break_off()
                return start
            part = text[start : start + taken]
            if inside:
                self._pieces.append(CallArguments(self._index, part))
            else:
                self._held.append(part)
            start += taken
            if self._object.ended:
                self._end(whole=True)
                return start
        return start

    def _read_close(self, text: str, start: int) -> int:
        """After a call's object: CLOSE, or what comes instead."""
        if not self._partial and text[start] in BLANKS:
            return start + 1
        part = self._partial + text[start : start + len(CLOSE)]
        if part.startswith(CLOSE):
            taken = len(CLOSE) - len(self._partial)
            self._partial = ""
            self._read = self._read_text
            return start + taken
        if CLOSE.startswith(part):
            self._partial = part
            return len(text)
        self._read = self._read_text
        return start

    def _begin(self, name: str) -> None:
        self._pieces.append(CallBegun(self._index, name))
        self._held, self._blanks, self._after_call = [], [], True

    def _end(self, whole: bool) -> None:
        self._pieces.append(CallEnded(self._index, whole))
        self._index += 1
        self._read = self._read_close

    def _end_unordered(self) -> None:
        """A whole object, whose arguments have not been told: they did not follow its name."""
        call = _call(self._object)
        if call is None:
            self._say_held()
            return
        self._begin(call.name)
        self._pieces.append(CallArguments(self._index, call.arguments))
        self._end(whole=True)

    def _break_off(self) -> None:
        self._end(whole=False)
        self._say_held()

    def _say_held(self) -> None:
        self._read = self._read_text
        self._say("".join(self._held))
        self._held = []


def _name_before_arguments(read: JsonObject) -> str | None:
    """The call's name, if the character read last began its arguments."""
    if not read.opened or read.key not in _ARGUMENTS or not read.members.keys().isdisjoint(_ARGUMENTS):
        return None
    return _text(read.members.get("name"))


def _call(read: JsonObject) -> Call | None:
    """What a whole object calls, if it is a call."""
    name = _text(read.members.get("name"))
    arguments = next((read.members[key] for key in _ARGUMENTS if key in read.members), "{}")
    if arguments.startswith('"'):  # an object as text, as in OpenAI's messages
        arguments = _text(arguments) or ""
        if not is_object(arguments):
            return None
    return Call(name, arguments) if name and arguments.lstrip(BLANKS).startswith("{") else None


def is_object(text: str) -> bool:
    """`text` is a JSON object, and blanks."""
    read = JsonObject()
    at = 0
    while at < len(text) and not read.ended and (taken := read.take(text, at)):
        at += taken
    return read.ended and not text[at:].strip(BLANKS)


def _text(member: str | None) -> str | None:
    """A member's value, if it is text that can be sent."""
    value = json.loads(member) if member and member.startswith('"') else None
    return value if value and not re.search("[\ud800-\udfff]", value) else None


def parameters_of(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments. Raises: RequestError when it is not JSON, or not of an object"""
    wanted = f"expected the parameters of the tool {tool.name!r} to be a JSON Schema of an object"
    try:
        schema = json.loads(tool.parameters or "{}")
    except (ValueError, RecursionError) as fault:
        raise RequestError(f"{wanted}, got what is no JSON: {fault}", "tools") from fault
    if not isinstance(schema, dict):
        raise RequestError(f"{wanted}, got {json.dumps(schema)[:80]}", "tools")
    if schema.setdefault("type", "object") != "object":
        raise RequestError(f"{wanted}, got the type {json.dumps(schema['type'])[:80]}", "tools")
    return schema
