"""A chat to the tokens of its prompt, by the model's own Jinja template.

Owns: the rule that nothing said in a chat becomes a control token (by `mask.py`), the rule that what was run is never tokenised again,
and how a prompt ends. Knows nothing of ledgers or requests: a `Message` brings the tokens it was generated as; nor how tools are told
of where the template says nothing of them (`tool_prompt.py`).

How it works. Replies that come with ids are rendered as one private-use character each, a marker; all other content as its
text, in which one character of each control token it spells, or may help to spell together with its neighbours, is another
private-use character, a stand-in. The rendered text is cut at the markers. Each gap between them is split at its control
tokens, which only the template can have written, and its plain text, stand-ins undone, is encoded piece by piece. A gap whose
digest is the one its reply was generated after keeps the very tokens that were run.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jinja2
from jinja2 import meta

from engine import tool_prompt
from engine.core import Ending, Message, ModelError, Prompt, RequestError, Tool
from engine.mask import Content, Edges, Mask, masked
from engine.sandbox import Refusal, environment
from engine.tokenizer import Place, Tokenizer, check_text
from engine.tool_calls import CLOSE, OPEN
from engine.tool_prompt import Row

ROLES = ("system", "user", "assistant", "tool")

_BLANKS = 4  # characters that a template may write between what was run and a reply, see `_leads`
_PRIVATE = re.compile("[\ue000-\uf8ff\U000f0000-\U000ffffd]")  # Unicode's private-use characters, of two planes


class ChatTemplate:
    """A model's chat template, compiled once. `None`: the model has none, and every `prompt` is refused.

    `bos_token`, `eos_token` and others (`unk_token`, ...): texts that the template may use by these names.
    Raises: ModelError when the template is not valid Jinja.
    """

    def __init__(self, template: str | None, tokenizer: Tokenizer, bos_token: str = "", eos_token: str = "", **other_tokens: str) -> None:
        self._tokenizer = tokenizer
        self._words = {**other_tokens, "bos_token": bos_token, "eos_token": eos_token}
        self._source = template
        self._reserved = set(_PRIVATE.findall("".join([template or "", *self._words.values(), *tokenizer.control])))
        self._edges = Edges(tokenizer)
        try:
            self._template = None if template is None else environment().from_string(template)
            self._knows_tools = template is not None and _knows_tools(template)
        except jinja2.TemplateSyntaxError as fault:
            raise ModelError(f"expected the model's chat template to be valid Jinja: {fault} (line {fault.lineno})") from fault

    def digest(self) -> str:
        """SHA-256, in hex, of all that decides how a chat is rendered, apart from the tokenizer."""
        return hashlib.sha256(json.dumps([self._source, self._words]).encode()).hexdigest()

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = (), ending: Ending = Ending.REPLY) -> Prompt:
        """The prompt for the reply that follows `messages`, which may call `tools`; or which goes on with the last of them.

        Raises: RequestError when the model has no template, the template refuses the chat (`raise_exception`), a message or tool
        is not Unicode, a message is of an unknown role or cannot be gone on with, or a tool's schema is none; ModelError when the
        template itself is at fault.
        """
        _check(messages, ending)
        functions = tool_prompt.functions(tools)
        calls = {index: row for index, message in enumerate(messages) if (row := self._calls_apart(message))}
        if ending is Ending.CONTINUE:
            calls.pop(len(messages) - 1, None)  # it may go on inside a call
        private = self._unused_characters([*(message.text for message in messages), *map(_plain_json, (functions, list(calls.values())))])
        chat = _Chat(messages, tools, ending, calls, Mask(self._tokenizer, self._edges, private), next(private))
        markers = {next(private): index for index, message in enumerate(messages) if message.ids is not None}
        while True:
            rendered = self._render(chat.rows(markers, self._knows_tools), chat.functions(functions) if self._knows_tools else None, ending)
            parts = re.split(f"([{''.join(markers)}])", rendered) if markers else [rendered]
            repeated = [marker for marker, count in Counter(parts[1::2]).items() if count > 1]
            if not repeated:
                return self._assemble(chat.cut(parts, markers), markers, messages, chat)
            for marker in repeated:  # the template quotes this reply: only its text can stand in two places
                del markers[marker]

    def measure(self, messages: Sequence[Message], most: int, tools: Sequence[Tool] = ()) -> tuple[int, ...]:
        """Where each message of a chat ends, in tokens, to choose by which of them to run.

        As `Prompt.ends`, but messages that would not be told apart there are encoded each by itself, so a few tokens may be missed at
        their edges. What surely has `most` tokens or more counts as `most`, and is not read. Raises: as `prompt`
        """
        counted = list(messages)
        for index, message in enumerate(messages):
            long = len(message.text) // self._tokenizer.longest >= most
            beside = (*messages[max(0, index - 1) : index], *messages[index + 1 : index + 2])
            if message.ids is None and (long or any(other.ids is None for other in beside)):
                ids = (0,) * most if long else tuple(self._tokenizer.encode_plain(message.text, Place.INSIDE))
                counted[index] = replace(message, ids=ids)
        return self.prompt(counted, tools).ends

    def _calls_apart(self, message: Message) -> Row | None:
        return tool_prompt.with_calls_apart(message) if self._knows_tools and message.ids is None else None

    def _unused_characters(self, texts: Sequence[str]) -> Iterator[str]:
        """Private-use characters that occur neither in the chat nor in the template."""
        used = self._reserved.union(*(_PRIVATE.findall(text) for text in texts if not text.isascii()))
        planes = itertools.chain(range(0xE000, 0xF900), range(0xF0000, 0xFFFFE))
        yield from (character for character in map(chr, planes) if character not in used)
        raise RequestError("expected a chat that leaves some of Unicode's private-use characters unused, got one that uses all")

    def _render(self, rows: list[Row], functions: list[Row] | None, ending: Ending) -> str:
        if self._template is None:
            raise RequestError("this model has no chat template: it completes raw text, but takes no messages", "messages")
        opens = ending is Ending.REPLY
        try:
            return self._template.render(messages=rows, tools=functions, documents=None, add_generation_prompt=opens, **self._words)
        except Refusal as refusal:
            raise RequestError(f"the model's chat template refuses this chat: {refusal}", "messages") from refusal
        except RequestError:
            raise
        except Exception as fault:  # a template may run into any error that Python has
            raise ModelError(f"the model's chat template failed: {type(fault).__name__}: {fault}") from fault

    def _assemble(self, parts: list[str], markers: dict[str, int], messages: Sequence[Message], chat: _Chat) -> Prompt:
        """`parts`: gaps and markers in turn, a gap at both ends."""
        ids: list[int] = []
        ends: dict[int, int] = {}
        for gap, marker in zip(parts[:-1:2], parts[1::2], strict=True):
            reply, first = messages[markers[marker]], not ids
            pieces = self._pieces(gap, chat.mask)
            known = reply.lead_digest in (_digest(lead, first) for lead in _leads(pieces))
            lead = list(reply.lead_ids) if known else self._encode(pieces, first)
            ids += [*lead, *(reply.ids or ())]
            ends[markers[marker]] = len(ids)
            if markers[marker] == chat.last:
                digest = reply.lead_digest if known else _digest(pieces, first)
                return Prompt(ids, (*lead, *(reply.ids or ())), digest, True, _ends(messages, ends, len(ids)))
        first = not ids
        pieces = self._pieces(parts[-1], chat.mask)
        lead = self._encode(pieces, first)
        ids += lead
        before = None
        if chat.last is not None and messages[chat.last].role == "assistant":
            before = _without(pieces, messages[chat.last].text)
        digest = _digest(pieces if before is None else before, first)
        return Prompt(ids, tuple(lead), digest, before is not None, _ends(messages, ends, len(ids)))

    def _pieces(self, gap: str, mask: Mask) -> list[str | int]:
        return [piece if isinstance(piece, int) else mask.undo(piece) for piece in self._tokenizer.split_control(gap)]

    def _encode(self, pieces: list[str | int], first: bool) -> list[int]:
        ids: list[int] = []
        place = Place.START if first else Place.INSIDE
        for piece in pieces:
            ids += [piece] if isinstance(piece, int) else self._tokenizer.encode_plain(piece, place)
            place = Place.SECTION
        return ids


class _Chat:
    """The chat of one prompt, as its template is given it."""

    def __init__(
        self, messages: Sequence[Message], tools: Sequence[Tool], ending: Ending, calls: dict[int, Row], mask: Mask, end: str
    ) -> None:
        self.mask = mask
        self._messages = messages
        self._tools = tools
        self.last = len(messages) - 1 if ending is Ending.CONTINUE else None  # the message that goes on
        self._end = end  # a character that stands where it goes on
        self._calls = calls  # messages whose calls the template writes, by index
        self._contents: dict[int, str] = {}

    def rows(self, markers: dict[str, int], knows_tools: bool) -> list[Row]:
        """`markers`: what stands for a message that is not shown, and its index. `knows_tools`: the template says itself what tools are."""
        marked = {index: marker for marker, index in markers.items()}
        rows = [self._row(index, message, marked.get(index)) for index, message in enumerate(self._messages)]
        if knows_tools:
            return rows
        if self._tools:
            text = Content(self.mask.content(tool_prompt.system_text(self._tools)), self.mask)
            rows = tool_prompt.with_system_text(rows, text, self._joined)
        return tool_prompt.with_responses_as_user(rows, self._joined)

    def functions(self, functions: list[Row]) -> list[Row] | None:
        return masked(functions, self.mask) or None

    def cut(self, parts: list[str], markers: dict[str, int]) -> list[str]:
        """`parts`, gaps and markers of the rendered text in turn, up to where the last message goes on.

        Raises: RequestError when the template does not write that message as it is
        """
        if self.last is None:
            return parts
        marker = next((marker for marker, index in markers.items() if index == self.last), None)
        if marker in parts[1::2]:
            return [*parts[: parts.index(marker) + 1], ""]
        gaps = [number for number in range(0, len(parts), 2) if self._end in parts[number]]
        if marker is None and len(gaps) == 1 and parts[gaps[0]].count(self._end) == 1:
            text, _, after = parts[gaps[0]].partition(self._end)
            shown = self._messages[self.last].text.strip()
            if shown and not after.startswith(" "):  # blanks are trimmed
                text = text.rstrip()
            if self.mask.undo(text).rstrip().endswith(shown):
                return [*parts[: gaps[0]], text]
        message = "expected a last message to go on with that the model's chat template writes as it is, got one that it changes"
        raise RequestError(message, "messages")

    def _row(self, index: int, message: Message, marker: str | None) -> Row:
        if marker is not None:
            return {"role": message.role, "content": marker}
        if row := self._calls.get(index):
            calls = [{"type": "function", "function": masked(call["function"], self.mask)} for call in row["tool_calls"]]
            return {"role": message.role, "content": Content(self.mask.content(row["content"]), self.mask), "tool_calls": calls}
        if index not in self._contents:
            self._contents[index] = Content(self.mask.content(message.text), self.mask)
        content = self._contents[index]
        if index == self.last:  # a blank at the end tells whether the template trims it
            content = Content(content + self._end + " ", self.mask)
        return {"role": message.role, "content": content}

    def _joined(self, *parts: str) -> Content:
        return Content("".join(parts), self.mask)


def _check(messages: Sequence[Message], ending: Ending) -> None:
    if not messages:
        raise RequestError("expected at least one message, got none", "messages")
    for message in messages:
        if message.role not in ROLES:
            raise RequestError(f"expected a role of {', '.join(ROLES)}, got {message.role!r}", "messages")
        check_text(message.text)
    if ending is Ending.CONTINUE and messages[-1].role not in ("user", "assistant"):
        raise RequestError(f"expected a last message of user or assistant to go on with, got one of {messages[-1].role!r}", "messages")


def _plain_json(value: Any) -> str:
    """Raises: RequestError when a text in it is not Unicode."""
    text = json.dumps(value, ensure_ascii=False)
    check_text(text)
    return text


def _knows_tools(template: str) -> bool:
    """The template says itself what tools there are, and writes calls of them as they are read here."""
    return OPEN in template and CLOSE in template and "tools" in meta.find_undeclared_variables(environment().parse(template))


def _ends(messages: Sequence[Message], known: dict[int, int], total: int) -> tuple[int, ...]:
    """`Prompt.ends`. `known`: where the messages that stand as markers end, by index; `total`: tokens of the prompt."""
    ends = [0]
    for index, message in enumerate(messages):
        end = known.get(index, 0)
        if index + 1 == len(messages):
            end = total
        elif index + 1 in known and not (message.role == "assistant" and end):
            end = known[index + 1] - len(messages[index + 1].ids or ())
        ends.append(max(ends[-1], end))
    return tuple(ends[1:])


def _without(pieces: list[str | int], text: str) -> list[str | int] | None:
    """A gap without the message it ends with, whose blanks a template may have trimmed; None if it ends otherwise."""
    match pieces:
        case [*front, str(last)]:
            for said in (text, text.rstrip(), text.lstrip(), text.strip()):
                if said and last.endswith(said):
                    return [*front, rest] if (rest := last.removesuffix(said)) else front
    return None


def _digest(pieces: list[str | int], first: bool) -> bytes:
    """Of a gap's text with control tokens apart from text that looks like them, and of its being the prompt's front."""
    digest = hashlib.sha256(b"front" if first else b"later")
    for piece in pieces:
        if isinstance(piece, int):
            digest.update(b"\0" + piece.to_bytes(8, "little"))
        else:
            text = piece.encode()
            digest.update(b"\1" + len(text).to_bytes(8, "little") + text)
    return digest.digest()


def _leads(pieces: list[str | int]) -> Iterator[list[str | int]]:
    """What may have been run before the reply that follows a gap: the gap, or the gap without some blanks at its end.

    Some templates (Llama 2) write a space before a reply in a chat's history that they leave to the model to generate.
    """
    for _ in range(1 + _BLANKS):
        yield pieces
        match pieces:
            case [*front, str(last)] if last[-1].isspace():
                pieces = [*front, last[:-1]] if last[:-1] else front
            case _:
                return
