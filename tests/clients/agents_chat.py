"""The OpenAI Agents SDK, over Responses (its default) and over chat completions."""

from __future__ import annotations

import json
from typing import Any, Literal

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from telling import BASE_URL, MODEL, QUESTIONS, WEATHER, run, tell

set_tracing_disabled(True)  # traces would go to OpenAI
WAYS = {"responses": OpenAIResponsesModel, "completions": OpenAIChatCompletionsModel}


def agent(way: Any, max_tokens: int, **settings: Any) -> Agent[None]:
    tools = settings.pop("tools", [])
    model = way(MODEL, AsyncOpenAI(base_url=BASE_URL, api_key="unused", max_retries=0))
    model_settings = ModelSettings(temperature=0, max_tokens=max_tokens, include_usage=True, **settings)
    return Agent("Helper", model=model, model_settings=model_settings, tools=tools)


async def say(agent: Agent[None], items: list[Any]) -> list[Any]:
    """One run, streamed, calls and all; returns what the next one starts with."""
    result = Runner.run_streamed(agent, items)
    pieces = []
    async for event in result.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            pieces.append(event.data.delta)
    made: list[Any] = [item.to_input_item() for item in result.new_items]
    calls = [item for item in made if item.get("type") == "function_call"]
    tell(
        pieces=pieces,
        text=result.final_output,
        cached=result.context_wrapper.usage.input_tokens_details.cached_tokens,
        calls=[{"name": call["name"], "arguments": json.loads(call["arguments"])} for call in calls],
        results=[item["output"] for item in made if item.get("type") == "function_call_output"],
    )
    return result.to_input_list()


async def turns(way: Any) -> None:
    items: list[Any] = []
    for question in QUESTIONS:
        items = await say(agent(way, 24), [*items, {"role": "user", "content": question}])


@function_tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    return f"21 degrees in {city}"


async def calls(way: Any) -> None:
    """After a call the SDK itself takes `tool_choice` back, so that the agent can answer."""
    caller = agent(way, 80, tools=[weather], tool_choice="required", parallel_tool_calls=False)
    await say(caller, [{"role": "user", "content": WEATHER}])


run(WAYS, turns=turns, tool=calls)
