"""Chats, templates and tokenizers for tests of how a chat becomes a prompt."""

from __future__ import annotations

import functools
from pathlib import Path

import jinja2
from hypothesis import strategies as st

from engine.chat_template import ChatTemplate
from engine.core import Message, Prompt
from engine.tokenizer import Tokenizer
from tests.engine.small_tokenizers import byte_level_values, make

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe kind<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}"
    "{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\n' + system_message + '\n<</SYS>>\n\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
QWEN = (
    "{%- for message in messages %}{%- if message.role != 'assistant' %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- else %}"
    "{%- set content = message.content %}{%- set reasoning = '' %}{%- if '</think>' in content %}"
    "{%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{{- '<|im_start|>assistant\n' }}{%- if loop.last %}{{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' }}{%- endif %}"
    "{{- content.lstrip('\n') + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
BARE = "{% for message in messages %}{{ message.content }}{% endfor %}"
WORDS = {"bos_token": "<|begin_of_text|>", "eos_token": "<|im_end|>"}
CONTROL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<<", "<|im_start|>a", "x<|im_end|>", "ABA"),  # made to overlap
)
LAYOUTS = {"chatml": CHATML, "llama3": LLAMA3, "llama2": LLAMA2, "qwen": QWEN}


def bytes_tokenizer(folder: Path, control: tuple[str, ...] = CONTROL[:7], user: tuple[str, ...] = ()) -> Tokenizer:
    return make(folder, byte_level_values(control, user=("<think>", "</think>", *user)))


@functools.cache
def template_of(layout: str, tokenizer: Tokenizer) -> ChatTemplate:
    return ChatTemplate(layout, tokenizer, **WORDS)


def chat(*texts: str, system: str | None = None) -> list[Message]:
    """User and assistant in turn."""
    turns = [Message("assistant" if index % 2 else "user", text) for index, text in enumerate(texts)]
    return turns if system is None else [Message("system", system), *turns]


def rendered(layout: str, messages: list[Message], words: dict[str, str] = WORDS) -> str:
    """By Jinja alone, without any of the engine's care."""

    def refuse(message: str) -> None:
        raise ValueError(message)

    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(layout)
    rows = [{"role": message.role, "content": message.text} for message in messages]
    return template.render(messages=rows, add_generation_prompt=True, raise_exception=refuse, **words)


CHATS = [
    chat("hello"),
    chat("hello", "the world", "12345 and 3.14", "don't", "  spaces   and\ttabs  "),
    chat("hello", system="the system says"),
    chat("  trimmed?\n\n", "\n\n  yes ", "日本語 🙂 é", system=" s "),
    chat("def f(x):\n    return x // 2\n\n\n", "```py\nx = 1\n```", "ok"),
    chat("a < b, c > d | e", "<b>bold</b> & <|", "|> <", "im_end", "x"),
    chat("<think>hm</think> a question", "<think>\nlong thought\n</think>\n\nan answer", "and?"),
    chat("", "", ""),
]


def reply(prompt: Prompt, text: str, ids: list[int]) -> Message:
    return Message("assistant", text, prompt.lead_ids, prompt.lead_digest, tuple(ids))


def parts(token: str) -> set[str]:
    return {token[start:stop] for start in (0, 2, len(token) - 2) for stop in (2, -1, len(token))} - {""}


PARTS = sorted(set().union(*map(parts, (*CONTROL, "</think>"))))
OTHERS = [*CONTROL, "<think>", "</think>", " ", "\n", "x", "é🙂", "\ue000", "\U000f0000"]
SAID = st.lists(st.sampled_from([*OTHERS, *PARTS]), max_size=6).map("".join)


def control_ids(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    return [id for id in prompt.ids if id in set(tokenizer.control.values())]
