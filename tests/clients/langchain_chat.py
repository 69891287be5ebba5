"""LangChain's ChatOpenAI, over chat completions (its default) and over Responses."""

from __future__ import annotations

from typing import Any, Literal

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from telling import BASE_URL, MODEL, QUESTIONS, WEATHER, run, tell

WAYS = {"completions": {"stream_usage": True}, "responses": {"use_responses_api": True, "use_previous_response_id": True}}


def chat(way: dict[str, Any], max_tokens: int) -> ChatOpenAI:
    asking: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": max_tokens}
    return ChatOpenAI(base_url=BASE_URL, api_key="unused", max_retries=0, **asking, **way)


async def say(way: dict[str, Any], messages: list[Any]) -> None:
    whole: Any = None
    pieces = []
    async for chunk in chat(way, 24).astream(messages):
        whole = chunk if whole is None else whole + chunk
        if chunk.text:
            pieces.append(str(chunk.text))
    messages.append(whole)
    tell(pieces=pieces, text=str(whole.text), cached=whole.usage_metadata["input_token_details"]["cache_read"])


async def turns(way: dict[str, Any]) -> None:
    messages: list[Any] = []
    for question in QUESTIONS:
        messages.append(HumanMessage(question))
        await say(way, messages)


@tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    return f"21 degrees in {city}"


async def calls(way: dict[str, Any]) -> None:
    messages: list[Any] = [HumanMessage(WEATHER)]
    bound = chat(way, 80).bind_tools([weather], tool_choice="required", parallel_tool_calls=False, strict=True)
    called: Any = await bound.ainvoke(messages)
    messages.append(called)
    results = [await weather.ainvoke(call) for call in called.tool_calls]
    messages += results
    made = [{"name": call["name"], "arguments": call["args"]} for call in called.tool_calls]
    tell(calls=made, results=[result.text for result in results])
    await say(way, messages)


run(WAYS, turns=turns, tool=calls)
