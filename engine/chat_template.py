"""A chat to the tokens of its prompt, by the model's own Jinja template.

Owns: the sandbox that templates run in, the rule that nothing said in a chat becomes a control token, and the rule that what
was run is never tokenised again. Knows nothing of ledgers or requests: a `Message` brings the tokens it was generated as.

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.core import Message, ModelError, Prompt, RequestError
from engine.tokenizer import Place, Tokenizer, check_text

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
        self._edges = _Edges(tokenizer)
        try:
            self._template = None if template is None else _environment().from_string(template)
        except jinja2.TemplateSyntaxError as fault:
            raise ModelError(f"expected the model's chat template to be valid Jinja: {fault} (line {fault.lineno})") from fault

    def digest(self) -> str:
        """SHA-256, in hex, of all that decides how a chat is rendered, apart from the tokenizer."""
        return hashlib.sha256(json.dumps([self._source, self._words]).encode()).hexdigest()

    def prompt(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> Prompt:
        """The prompt for the reply that follows `messages`.

        Raises: RequestError when the model has no template, the template refuses the chat (`raise_exception`), or a message
        is not Unicode or of an unknown role; ModelError when the template itself is at fault.
        """
        _check(messages)
        private = self._unused_characters(messages)
        mask = _Mask(self._tokenizer, self._edges, private)
        markers = {next(private): index for index, message in enumerate(messages) if message.ids is not None}
        contents: dict[int, str] = {}
        while True:
            for index, message in enumerate(messages):
                if index not in contents and index not in markers.values():
                    contents[index] = _Content(mask.content(message.text), mask)
            shown = contents | {index: marker for marker, index in markers.items()}
            rows = [{"role": message.role, "content": shown[index]} for index, message in enumerate(messages)]
            rendered = self._render(rows, add_generation_prompt)
            parts = re.split(f"([{''.join(markers)}])", rendered) if markers else [rendered]
            repeated = [marker for marker, count in Counter(parts[1::2]).items() if count > 1]
            if not repeated:
                return self._assemble(parts, markers, messages, mask)
            for marker in repeated:  # the template quotes this reply: only its text can stand in two places
                del markers[marker]

    def measure(self, messages: Sequence[Message], most: int) -> tuple[int, ...]:
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
        return self.prompt(counted).ends

    def _unused_characters(self, messages: Sequence[Message]) -> Iterator[str]:
        """Private-use characters that occur neither in the chat nor in the template."""
        used = self._reserved.union(*(_PRIVATE.findall(message.text) for message in messages if not message.text.isascii()))
        planes = itertools.chain(range(0xE000, 0xF900), range(0xF0000, 0xFFFFE))
        yield from (character for character in map(chr, planes) if character not in used)
        raise RequestError("expected a chat that leaves some of Unicode's private-use characters unused, got one that uses all")

    def _render(self, rows: list[dict[str, str]], add_generation_prompt: bool) -> str:
        if self._template is None:
            raise RequestError("this model has no chat template: it completes raw text, but takes no messages", "messages")
        try:
            return self._template.render(
                messages=rows, tools=None, documents=None, add_generation_prompt=add_generation_prompt, **self._words
            )
        except _Refusal as refusal:
            raise RequestError(f"the model's chat template refuses this chat: {refusal}", "messages") from refusal
        except RequestError:
            raise
        except Exception as fault:  # a template may run into any error that Python has
            raise ModelError(f"the model's chat template failed: {type(fault).__name__}: {fault}") from fault

    def _assemble(self, parts: list[str], markers: dict[str, int], messages: Sequence[Message], mask: _Mask) -> Prompt:
        """`parts`: gaps and markers in turn, a gap at both ends."""
        ids: list[int] = []
        ends: dict[int, int] = {}
        for gap, marker in zip(parts[:-1:2], parts[1::2], strict=True):
            reply = messages[markers[marker]]
            pieces = self._pieces(gap, mask)
            known = reply.lead_digest in (_digest(lead, first=not ids) for lead in _leads(pieces))
            ids += reply.lead_ids if known else self._encode(pieces, first=not ids)
            ids += reply.ids or ()
            ends[markers[marker]] = len(ids)
        pieces = self._pieces(parts[-1], mask)
        lead = self._encode(pieces, first=not ids)
        return Prompt(ids + lead, tuple(lead), _digest(pieces, first=not ids), _ends(messages, ends, len(ids) + len(lead)))

    def _pieces(self, gap: str, mask: _Mask) -> list[str | int]:
        return [piece if isinstance(piece, int) else mask.undo(piece) for piece in self._tokenizer.split_control(gap)]

    def _encode(self, pieces: list[str | int], first: bool) -> list[int]:
        ids: list[int] = []
        place = Place.START if first else Place.INSIDE
        for piece in pieces:
            ids += [piece] if isinstance(piece, int) else self._tokenizer.encode_plain(piece, place)
            place = Place.SECTION
        return ids


def _check(messages: Sequence[Message]) -> None:
    if not messages:
        raise RequestError("expected at least one message, got none", "messages")
    for message in messages:
        if message.role not in ROLES:
            raise RequestError(f"expected a role of {', '.join(ROLES)}, got {message.role!r}", "messages")
        check_text(message.text)


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


class _Edges:
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


class _Mask:
    """Puts stand-ins into the contents of one prompt, and takes them out again.

    A stand-in stands for one character wherever it occurs, so a template may cut, repeat and move what it is given.
    """

    def __init__(self, tokenizer: Tokenizer, edges: _Edges, private: Iterator[str]) -> None:
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


class _Content(str):
    """A masked content that a template handles like the text it stands for.

    What a template looks for in it is masked alike, so `'</think>' in content` finds a spelled control token; and a text
    derived from it (a part, a trimmed or replaced text) is masked anew, at its new edges too.
    """

    __slots__ = ("_mask",)
    _mask: _Mask

    def __new__(cls, masked: str, mask: _Mask) -> _Content:
        content = super().__new__(cls, masked)
        content._mask = mask
        return content

    def _derive(self, result: Any) -> Any:
        """A filter's or method's result, if it is text, as a content."""
        if isinstance(result, _Content):
            return result
        if isinstance(result, str):
            if result == self:
                return self
            part = str.__contains__(self, result)  # then it spells no control token either
            return _Content(self._mask.edged(result) if part else self._mask.content(result), self._mask)
        if isinstance(result, list | tuple):
            return type(result)(map(self._derive, result))
        return result

    def _spell(self, argument: Any) -> Any:
        """What a template looks for, masked as it would be here."""
        if isinstance(argument, tuple):
            return tuple(map(self._spell, argument))
        return self._mask.spelled(argument) if type(argument) is str else argument


def _lifted(name: str) -> Callable[..., Any]:
    method = getattr(str, name)

    def call(self: _Content, *arguments: Any, **options: Any) -> Any:
        return self._derive(method(self, *map(self._spell, arguments), **options))

    return call


_LOOKING = ("__contains__", "count", "endswith", "find", "index", "rfind", "rindex", "startswith")
_CUTTING = ("__getitem__", "lstrip", "partition", "removeprefix", "removesuffix", "rpartition", "rsplit", "rstrip", "split", "splitlines")
_CHANGING = ("capitalize", "casefold", "lower", "replace", "strip", "swapcase", "title", "upper")
for _name in (*_LOOKING, *_CUTTING, *_CHANGING):
    setattr(_Content, _name, _lifted(_name))


class _Refusal(jinja2.TemplateError):
    """What a template raises by `raise_exception`."""


class _Generation(Extension):
    """`{% generation %}`, by which some templates mark replies for training: its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Sandbox(ImmutableSandboxedEnvironment):
    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """Jinja's own gives an undefined value, which prints as nothing: a template that reaches for internals is to fail."""
        raise SecurityError(f"access to attribute {attribute!r} of a {type(obj).__name__} is unsafe")


def _environment() -> _Sandbox:
    """Jinja as chat templates are written for: the dialect of `transformers`, in a sandbox."""
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation], cache_size=0)
    environment.filters["tojson"] = _tojson
    for name, function in environment.filters.items():
        environment.filters[name] = _deriving(function)
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_dict)
    return environment


def _deriving(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose result, where it is applied to a content, is one too."""
    subject = 1 if hasattr(function, "jinja_pass_arg") else 0  # after what Jinja itself hands over

    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        result = function(*arguments, **options)
        content = arguments[subject] if len(arguments) > subject else None
        return content._derive(result) if isinstance(content, _Content) else result

    return call


def _raise_exception(message: str) -> None:
    raise _Refusal(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _dict(*arguments: Any, **items: Any) -> dict[Any, Any]:
    return dict(*arguments, **items)  # a function: the class itself has attributes


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
