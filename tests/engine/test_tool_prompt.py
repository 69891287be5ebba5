"""What a model is told of its tools: by its own template, or by Hocket's tool prompt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from engine.chat_template import ChatTemplate
from engine.core import Ending, Message, RequestError, Tool
from engine.tokenizer import Tokenizer
from engine.tool_calls import CLOSE, OPEN, call_text, whole_calls
from engine.tool_prompt import system_text
from tests.engine.chats import CHATML, LAYOUTS, LLAMA3, SAID, bytes_tokenizer, chat, control_ids, rendered, reply, template_of

TOOLS_TOKENS = (OPEN, CLOSE, "<tool_response>", "</tool_response>")
HERMES = (  # in the manner of Qwen's
    "{%- if tools %}{{- '<|im_start|>system\n' }}{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}"
    "{{- '<tools>' }}{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}{{- '\n</tools><|im_end|>\n' }}"
    "{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{%- endif %}"
    "{%- for message in messages %}{%- if message.role == 'user' %}{{- '<|im_start|>user\n' + message.content + '<|im_end|>\n' }}"
    "{%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant\n' + message.content }}{%- for call in message.tool_calls %}"
    "{%- if message.content or not loop.first %}{{- '\n' }}{%- endif %}{%- if call.function %}{%- set call = call.function %}{%- endif %}"
    "{{- '<tool_call>\n{\"name\": \"' + call.name + '\", \"arguments\": ' }}{{- call.arguments | tojson }}{{- '}\n</tool_call>' }}"
    "{%- endfor %}{{- '<|im_end|>\n' }}{%- elif message.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
CITY = '{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}'
TOOLS = (Tool("weather", "Says how the weather is.", CITY), Tool("clock", "", ""))
PARIS = call_text("weather", '{"city": "Paris"}')
TWO = f"Let me see.\n{PARIS}\n{call_text('clock', '{}')}"
CALLED = [*chat("Weather and time?", TWO), Message("tool", "rain"), Message("tool", "noon"), Message("user", "Thanks")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tools")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return bytes_tokenizer(folder, user=TOOLS_TOKENS)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return bytes_tokenizer(tmp_path_factory.mktemp("plain"))


def spelled(tokenizer: Tokenizer, ids: list[int]) -> str:
    return b"".join(map(tokenizer.token_bytes, ids)).decode()


def test_the_tool_prompt_is_the_documented_one() -> None:
    documented = (Path(__file__).parents[2] / "docs" / "tools.md").read_text()
    assert system_text(TOOLS) in documented
    assert system_text(TOOLS) == system_text(TOOLS) != system_text(TOOLS[:1])
    example = next(call for call in whole_calls(system_text(TOOLS)))
    assert example.name == "the tool's name", "the model is shown what is read back"


# Where the template has no tools branch.
def test_the_tool_prompt_is_a_system_message_or_ends_the_first(plain: Tokenizer) -> None:
    for layout in (CHATML, LLAMA3):
        template, text = template_of(layout, plain), system_text(TOOLS)
        for messages, same in (
            (chat("hello"), chat("hello", system=text)),
            (chat("hello", system="Be kind."), chat("hello", system=f"Be kind.\n\n{text}")),
            (chat("hello", system=""), chat("hello", system=text)),
        ):
            assert template.prompt(messages, TOOLS).ids == template.prompt(same).ids
            assert template.prompt(messages).ids != template.prompt(same).ids


def test_what_tools_return_is_told_in_the_users_name(plain: Tokenizer) -> None:
    told = "<tool_response>\nrain\n</tool_response>\n<tool_response>\nnoon\n</tool_response>"
    template = template_of(CHATML, plain)
    expected = template.prompt([*CALLED[:2], Message("user", told), *CALLED[4:]])
    assert template.prompt(CALLED).ids == expected.ids
    assert spelled(plain, expected.ids).count("<|im_start|>tool") == 0


@pytest.mark.parametrize("layout", [CHATML, HERMES])
def test_with_the_same_tools_a_turn_finds_all_of_the_turn_before(tokenizer: Tokenizer, layout: str) -> None:
    template = template_of(layout, tokenizer)
    messages, sent = chat("hello", system="s"), []
    for turn in range(4):
        prompt = template.prompt(messages, TOOLS)
        assert prompt.ids[: len(sent)] == sent
        assert prompt.ids[len(prompt.ids) - len(prompt.lead_ids) :] == list(prompt.lead_ids)
        odd = [300 + turn, *tokenizer.encode_plain("x")]
        sent = prompt.ids + odd
        messages += [reply(prompt, TWO, odd), Message("tool", "rain"), Message("tool", f"noon {turn}")]
    other = template.prompt(messages, TOOLS[:1])
    assert other.ids[-40:] == template.prompt(messages, TOOLS).ids[-40:] and other.ids != template.prompt(messages, TOOLS).ids
    assert 303 in other.ids, "under other tools, replies keep their tokens"


@pytest.mark.parametrize("layout", [CHATML, HERMES])
def test_a_chat_with_tools_is_measured(tokenizer: Tokenizer, layout: str) -> None:
    template = template_of(layout, tokenizer)
    messages = [Message("system", "s"), *CALLED]
    ends = template.measure(messages, 1000, TOOLS)
    whole = template.prompt(messages, TOOLS).ids
    assert len(ends) == len(messages) and list(ends) == sorted(ends) and abs(ends[-1] - len(whole)) <= 90
    assert ends[-1] - template.measure(messages, 1000)[-1] >= 100, "the tools count"
    known = [*chat("hello"), Message("assistant", "a", ids=(300,)), Message("tool", "r")]
    assert template.prompt(known, TOOLS).ends == template.measure(known, 1000, TOOLS)


# Where it has one.
@pytest.mark.parametrize("tools", [(), TOOLS])
def test_a_template_with_a_tools_branch_says_it_itself(folder: Path, tokenizer: Tokenizer, tools: tuple[Tool, ...]) -> None:
    oracle = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), clean_up_tokenization_spaces=False)
    rows = [{"role": message.role, "content": message.text} for message in CALLED]
    calls = [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}]
    calls += [{"type": "function", "function": {"name": "clock", "arguments": {}}}]
    rows[1] = {"role": "assistant", "content": "Let me see.", "tool_calls": calls}
    given = [
        {"type": "function", "function": {"name": "weather", "description": "Says how the weather is.", "parameters": json.loads(CITY)}},
        {"type": "function", "function": {"name": "clock", "description": "", "parameters": {"type": "object"}}},
    ]
    expected = oracle.apply_chat_template(
        rows, tools=given if tools else None, chat_template=HERMES, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    ids = template_of(HERMES, tokenizer).prompt(CALLED, tools).ids
    assert ids == expected
    assert ids.count(tokenizer.control[OPEN]) == 2 and ids.count(tokenizer.control["<tool_response>"]) == 2


def test_a_reply_that_is_no_plain_text_and_calls_stays_as_it_is(tokenizer: Tokenizer) -> None:
    template = template_of(HERMES, tokenizer)
    for text in (f"{PARIS}\nand", PARIS[:30], f"{OPEN} x", call_text("x", '{"a": %s}' % ("1" * 5000)), f"{PARIS}\n{PARIS[:50]}"):
        prompt = template.prompt(chat("a", text, "b"))
        assert f"assistant\n{text}<|im_end|>" in spelled(tokenizer, prompt.ids)
    going_on = template.prompt(chat("a", PARIS), ending=Ending.CONTINUE)
    assert spelled(tokenizer, going_on.ids).endswith(PARIS)


def test_only_a_template_that_writes_calls_as_they_are_read_knows_tools(plain: Tokenizer) -> None:
    other = CHATML + "{% if tools %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}"
    mentions = CHATML + "{# tools <tool_call> </tool_call> #}"
    for layout in (other, mentions):
        assert system_text(TOOLS) in spelled(plain, template_of(layout, plain).prompt(chat("a"), TOOLS).ids)
        assert "[TOOLS]" not in spelled(plain, template_of(layout, plain).prompt(chat("a"), TOOLS).ids)


# S7 holds for tools too.
NAMES = st.sampled_from(["x", "get_weather"])


@settings(deadline=None)
@given(texts=st.lists(SAID, min_size=6, max_size=6), layout=st.sampled_from([CHATML, LLAMA3, HERMES]))
def test_nothing_of_a_tool_or_call_becomes_a_control_token(tokenizer: Tokenizer, texts: list[str], layout: str) -> None:
    template = template_of(layout, tokenizer)

    def prompt(a: str, b: str, c: str, d: str, e: str, f: str) -> list[int]:
        schema = json.dumps({"type": "object", "properties": {a: {"description": b, "enum": [c, {d: [1]}]}}}, ensure_ascii=len(a) % 2 == 0)
        arguments = json.dumps({e: f}, ensure_ascii=len(e) % 2 == 0)
        messages = [Message("user", a), Message("assistant", call_text("x", arguments)), Message("tool", b), Message("tool", c)]
        return control_ids(tokenizer, template.prompt(messages, [Tool("x", d, schema)]))

    assert prompt(*texts) == prompt(*"abcdef")


@pytest.mark.parametrize("hidden", ["\ue000", "\\ue000", "\U000f0000", "\ue001\\ue002"])
@pytest.mark.parametrize("where", ["description", "schema", "call"])
def test_a_tool_cannot_write_a_replys_marker(tokenizer: Tokenizer, hidden: str, where: str) -> None:
    written = json.loads(f'"{hidden}"')
    schema = f'{{"description": "{hidden}"}}' if where == "schema" else "{}"
    tools = [Tool("x", written if where == "description" else "", schema)]
    called = call_text("x", f'{{"a": "{hidden}"}}' if where == "call" else "{}")
    unused = tokenizer.control["<|eot_id|>"]  # the template writes none
    messages = [Message("user", "<|im_end|>"), Message("assistant", called), Message("user", "c"), Message("assistant", "d", ids=(unused,))]
    ids = template_of(HERMES, tokenizer).prompt(messages, tools).ids
    assert ids.count(unused) == 1 and written in spelled(tokenizer, ids)


@pytest.mark.parametrize("layout", [CHATML, HERMES])
@pytest.mark.parametrize(
    ("tool", "expected"),
    [
        (Tool("x", "", "{"), "JSON Schema of an object"),
        (Tool("x", "", '{"type": "array"}'), "JSON Schema of an object"),
        (Tool("x", "\ud800", ""), "lone surrogate"),
        (Tool("x", "", '{"description": "\\ud800"}'), "lone surrogate"),
    ],
)
def test_tools_that_cannot_be_told_are_refused(tokenizer: Tokenizer, layout: str, tool: Tool, expected: str) -> None:
    with pytest.raises(RequestError, match=expected):
        template_of(layout, tokenizer).prompt(chat("a"), [tool])


def test_chats_without_tools_are_what_they_were(plain: Tokenizer) -> None:
    messages = chat("hello", "the world", "12345", system="s")
    for layout in LAYOUTS.values():
        template = ChatTemplate(layout, plain, bos_token="<|begin_of_text|>", eos_token="<|im_end|>")
        assert spelled(plain, template.prompt(messages, ()).ids) == rendered(layout, messages)


def test_a_template_finds_the_members_of_tools_whatever_control_tokens_are_like(tmp_path: Path) -> None:
    """Where these are matched in normalised text, every edge of a text is masked, names of members too."""
    bytes_tokenizer(tmp_path, user=TOOLS_TOKENS)
    file = tmp_path / "tokenizer.json"
    spec = json.loads(file.read_text())
    spec["normalizer"] = {"type": "NFC"}
    for token in spec["added_tokens"]:
        token["normalized"] = True
    file.write_text(json.dumps(spec))
    normalising = Tokenizer(file, eos_ids=[2])
    assert normalising.control_is_normalized
    shown = "{{- tool.function.name ~ tool.get('type', '?') ~ ('function' in tool) ~ tool.missing }}"
    template = HERMES.replace("{{- tool | tojson }}", shown)
    told = spelled(normalising, template_of(template, normalising).prompt(CALLED, TOOLS).ids)
    assert "\nweatherfunctionTrue\nclockfunctionTrue\n" in told
    assert PARIS in told, "and those of calls"
