"""LiteLLM, with its provider for servers that speak as OpenAI does."""

from __future__ import annotations

import json
import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it fetches a list of prices otherwise

import litellm
from telling import BASE_URL, MODEL, QUESTIONS, WEATHER, run, tell

litellm.suppress_debug_info = True  # it speaks of a model whose price it does not know, on stdout
WAYS: dict[str, dict[str, Any]] = {
    "completions": {"model": f"openai/{MODEL}", "api_base": BASE_URL, "api_key": "unused", "temperature": 0, "num_retries": 0}
}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather of a city", "parameters": PARAMETERS}}


async def say(way: dict[str, Any], messages: list[Any], **settings: Any) -> None:
    asked = {**way, "max_tokens": 24, "stream": True, "stream_options": {"include_usage": True}, **settings}
    chunks = [chunk async for chunk in await litellm.acompletion(**asked, messages=messages)]
    whole: Any = litellm.stream_chunk_builder(chunks, messages=messages)
    pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    message = whole.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    tell(pieces=pieces, text=message.content, cached=whole.usage.prompt_tokens_details.cached_tokens)


async def turns(way: dict[str, Any]) -> None:
    messages: list[Any] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        await say(way, messages)


async def calls(way: dict[str, Any]) -> None:
    messages: list[Any] = [{"role": "user", "content": WEATHER}]
    asked = {**way, "max_tokens": 80, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    message: Any = (await litellm.acompletion(**asked, messages=messages)).choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    made = [{"name": call.function.name, "arguments": json.loads(call.function.arguments)} for call in message.tool_calls]
    results = [f"21 degrees in {call['arguments']['city']}" for call in made]
    for call, result in zip(message.tool_calls, results, strict=True):
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    tell(calls=made, results=results)
    await say(way, messages, tools=[TOOL], tool_choice="none")


run(WAYS, turns=turns, tool=calls)
