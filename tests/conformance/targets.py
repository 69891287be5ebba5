"""What is fuzzed: each endpoint with requests that it accepts, and the fields that it knows. Add an endpoint here, and it is fuzzed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from app.api.chat_completions import ChatRequest
from app.api.completions import CompletionRequest
from app.api.generate import GenerateRequest
from app.api.realtime.schema import SessionFields
from app.api.responses.schema import ResponseCreate

Body = dict[str, Any]

TOOL = {
    "type": "function",
    "name": "f",
    "description": "It does it.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
CHAT_TOOL = {"type": "function", "function": {name: TOOL[name] for name in ("name", "description", "parameters")}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "2"}
HISTORY = [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}, CALL, OUTPUT]

RESPONSES: tuple[Body, ...] = (
    {"input": "hello", "max_output_tokens": 1, "temperature": 0.5, "top_p": 0.9, "seed": 1, "metadata": {"a": "b"}},
    {"input": HISTORY, "max_output_tokens": 2, "store": False, "instructions": "Be brief.", "tools": [TOOL], "tool_choice": "auto"},
    {"input": "hi", "max_output_tokens": 2, "stop": ["a", "b"], "logit_bias": {"5": -100}, "top_logprobs": 2, "stop_token_ids": [4]},
    {
        "input": "hi",
        "max_output_tokens": 2,
        "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}},
        "truncation": "auto",
        "include": ["message.output_text.logprobs"],
    },
    {
        "input": "hi",
        "max_output_tokens": 2,
        "tools": [TOOL],
        "tool_choice": {"type": "function", "name": "f"},
        "parallel_tool_calls": False,
    },
    {"input": "hi", "max_output_tokens": 1, "generate": False, "service_tier": "flex", "reasoning": {"effort": "none"}, "tools": [TOOL]},
)
CHATS: tuple[Body, ...] = (
    {
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 1,
        "stop": ["a"],
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    {
        "messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "hi"}],
        "max_tokens": 1,
        "logprobs": True,
        "top_logprobs": 2,
        "n": 2,
    },
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "2"},
        ],
        "max_completion_tokens": 2,
        "tools": [CHAT_TOOL],
        "tool_choice": "required",
    },
    {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 2,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
    },
    {
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "he"}],
        "max_tokens": 1,
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
)
COMPLETIONS: tuple[Body, ...] = (
    {"prompt": "hello", "max_tokens": 1, "echo": True, "logprobs": 2, "stop": ["a"]},
    {"prompt": [[5, 6, 7], [8, 9]], "max_tokens": 1, "n": 2, "seed": 3, "logit_bias": {"5": 1}},
    {"prompt": ["a", "b"], "max_tokens": 1, "stream": True, "stream_options": {"include_usage": True}},
    {"prompt": [5, 6, 7], "max_tokens": 0, "echo": True, "logprobs": 0},
)
GENERATE: tuple[Body, ...] = (
    {"prompt": "hello", "max_new_tokens": 1, "temperature": 0.5, "stop": ["a"]},
    {"text": "hello", "sampling_params": {"max_new_tokens": 1, "top_k": 5, "regex": "[0-9]{3}"}},
    {"input_ids": [5, 6, 7], "max_tokens": 1, "stream": True},
)
CONVERSATIONS: tuple[Body, ...] = (
    {"metadata": {"a": "b"}, "items": HISTORY},
    {"items": [{"type": "message", "role": "user", "content": "hi"}]},
)
ITEMS: tuple[Body, ...] = (
    {"items": HISTORY},
    {"items": [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "yes"}]}]},
)
SESSION: Body = {"type": "realtime", "instructions": "Be brief.", "output_modalities": ["text"], "max_output_tokens": 1, "tools": [TOOL]}
SAID = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}
REALTIME: tuple[Body, ...] = (
    {"type": "session.update", "event_id": "e", "session": {**SESSION, "tool_choice": "none"}},
    {"type": "conversation.item.create", "previous_item_id": "root", "item": {"id": "item_1", **SAID}},
    {"type": "conversation.item.create", "item": CALL},
    {"type": "conversation.item.delete", "item_id": "item_1"},
    {"type": "conversation.item.retrieve", "item_id": "item_1"},
    {"type": "conversation.item.truncate", "item_id": "item_1", "content_index": 0, "audio_end_ms": 0},
    {
        "type": "response.create",
        "response": {"max_output_tokens": 1, "conversation": "none", "input": [SAID], "metadata": {"a": "b"}, "tools": [TOOL]},
    },
    {"type": "response.create", "response": {"max_output_tokens": 2, "input": HISTORY, "instructions": "x", "output_modalities": ["text"]}},
    {"type": "response.cancel", "response_id": "resp_x"},
    {"type": "input_audio_buffer.append", "audio": "AAAA"},
)
FRAMES: tuple[Body, ...] = (
    *({"type": "response.create", **body} for body in RESPONSES),
    {"type": "response.create", "stream_id": "a", "input": "hi", "max_output_tokens": 1, "previous_response_id": "resp_x"},
    {"type": "response.create", "stream_id": "b", "stream": True, "background": True, **RESPONSES[0]},
    {"type": "response.cancel", "response_id": "resp_x", "stream_id": "a"},
    {"type": "response.steer", "previous_response_id": "resp_x", "input": "Shorter."},
)


def fields_of(struct: Any) -> tuple[str, ...]:
    return tuple(struct.__struct_fields__)


@dataclass(frozen=True)
class Target:
    name: str
    cases: int
    valid: tuple[Body, ...]
    fields: tuple[str, ...] = ()
    path: str = ""  # {conversation}: of one that exists
    kind: Literal["http", "responses", "realtime"] = "http"


TARGETS = (
    Target("responses frames", 2400, FRAMES, (*fields_of(ResponseCreate), "response_id"), "/v1/responses", "responses"),
    Target("responses", 1500, RESPONSES, fields_of(ResponseCreate), "/v1/responses"),
    Target("input tokens", 300, RESPONSES, fields_of(ResponseCreate), "/v1/responses/input_tokens"),
    Target("chat completions", 1500, CHATS, fields_of(ChatRequest), "/v1/chat/completions"),
    Target("completions", 1000, COMPLETIONS, fields_of(CompletionRequest), "/v1/completions"),
    Target("generate", 700, GENERATE, fields_of(GenerateRequest), "/generate"),
    Target("realtime frames", 1300, REALTIME, ("event_id", "item_id", "response", "session", "item"), "/v1/realtime", "realtime"),
    Target(
        "client secrets",
        200,
        ({"expires_after": {"anchor": "created_at", "seconds": 60}, "session": SESSION},),
        fields_of(SessionFields),
        "/v1/realtime/client_secrets",
    ),
    Target("conversations", 500, CONVERSATIONS, ("items", "metadata"), "/v1/conversations"),
    Target("items", 400, ITEMS, ("items",), "/v1/conversations/{conversation}/items"),
    Target("metadata", 200, ({"metadata": {"a": "b"}},), ("metadata",), "/v1/conversations/{conversation}"),
)
