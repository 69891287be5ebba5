"""Where chat templates run: Jinja in the dialect of `transformers`, without a way out (S5).

Owns: what a template may use. What it makes of a masked content is one again. Knows nothing of chats.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.mask import Content


class Refusal(jinja2.TemplateError):
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


def environment() -> _Sandbox:
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
        return content.derive(result) if isinstance(content, Content) else result

    return call


def _raise_exception(message: str) -> None:
    raise Refusal(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _dict(*arguments: Any, **items: Any) -> dict[Any, Any]:
    return dict(*arguments, **items)  # a function: the class itself has attributes


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
