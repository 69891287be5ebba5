"""What a model is told of its tools, where its own template says nothing of them; and what templates that do are given.

Owns: Hocket's tool prompt (docs/tools.md), in the form of `tool_calls.py`. Knows nothing of tokens: texts are joined by what it is given.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from engine.core import Message, Tool
from engine.tool_calls import OPEN, CallArguments, CallBegun, CallEnded, Said, call_text, parameters_of, parse

Row = dict[str, Any]  # a message as a template takes it: role, content, and what calls it makes
Join = Callable[..., str]  # texts, put together as one content

_EXAMPLE = call_text("the tool's name", '{"an argument": "its value"}')
_TEXT = f"""You can call tools. These are there, a JSON object each:
<tools>
%s
</tools>
To call one, write this, and after it nothing but further calls:
{_EXAMPLE}
What it returns comes to you in <tool_response></tool_response>."""


def system_text(tools: Sequence[Tool]) -> str:
    """The tool prompt: the same text for the same tools."""
    return _TEXT % "\n".join(json.dumps(function["function"], ensure_ascii=False) for function in functions(tools))


def functions(tools: Sequence[Tool]) -> list[Row]:
    """Tools as templates take them: in OpenAI's form. Raises: RequestError when the parameters are not the schema of an object"""
    return [
        {"type": "function", "function": {"name": tool.name, "description": tool.description, "parameters": parameters_of(tool)}}
        for tool in tools
    ]


def with_system_text(rows: list[Row], text: str, join: Join) -> list[Row]:
    """`rows` with the tool prompt at the end of the first system message, or as one of its own."""
    first = next((row for row in rows if row["role"] == "system"), None)
    if first is None:
        return [{"role": "system", "content": text}, *rows]
    told = {**first, "content": join(first["content"], "\n\n", text) if first["content"] else text}
    return [told if row is first else row for row in rows]


def with_responses_as_user(rows: list[Row], join: Join) -> list[Row]:
    """`rows` with what tools returned in the user's name, neighbours in one message: templates without tools have no role for them."""
    told: list[Row] = []
    before = None
    for row in rows:
        if row["role"] == "tool":
            response = join("<tool_response>\n", row["content"], "\n</tool_response>")
            if before == "tool":
                told[-1] = {"role": "user", "content": join(told[-1]["content"], "\n", response)}
            else:
                told.append({"role": "user", "content": response})
        else:
            told.append(row)
        before = row["role"]
    return told


def with_calls_apart(message: Message) -> Row | None:
    """A reply's text and calls, for a template that writes calls itself. None: it makes none, or not as the template would write them."""
    if message.role != "assistant" or OPEN not in message.text:
        return None
    content, calls = "", []
    for number, piece in enumerate(parse(message.text)):
        match piece:
            case Said(text) if number == 0:
                content = text
            case CallBegun(_, name):
                calls.append({"type": "function", "function": {"name": name}})
            case CallArguments(_, text):
                try:
                    calls[-1]["function"]["arguments"] = json.loads(text)  # type: ignore[index]
                except ValueError:  # a number of too many digits
                    return None
            case CallEnded(_, True):
                pass
            case _:
                return None
    return {"role": message.role, "content": content, "tool_calls": calls} if calls else None
