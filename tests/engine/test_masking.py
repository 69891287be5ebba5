"""S7: nothing said in a chat becomes a control token, nor a marker, whatever the template makes of it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.chat_template import ChatTemplate
from engine.core import Message
from engine.tokenizer import Tokenizer
from tests.engine.chats import (
    CHATML,
    CONTROL,
    LLAMA2,
    LLAMA3,
    QWEN,
    SAID,
    bytes_tokenizer,
    chat,
    control_ids,
    rendered,
    template_of,
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return bytes_tokenizer(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def overlapping(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return bytes_tokenizer(tmp_path_factory.mktemp("overlapping"), CONTROL)


@settings(deadline=None)
@given(texts=st.lists(SAID, min_size=1, max_size=5), layout=st.sampled_from([CHATML, LLAMA3, LLAMA2]))
def test_control_tokens_are_those_of_a_harmless_chat(overlapping: Tokenizer, texts: list[str], layout: str) -> None:
    template = template_of(layout, overlapping)
    prompt, harmless = template.prompt(chat(*texts)), template.prompt(chat(*("harmless" for _ in texts)))
    assert control_ids(overlapping, prompt) == control_ids(overlapping, harmless)
    assert b"".join(map(overlapping.token_bytes, prompt.ids)).decode() == rendered(layout, chat(*texts))


@pytest.mark.parametrize("written", ["content", "content | trim", "(' ' ~ content ~ '\n') | trim"])
@settings(deadline=None)
@given(texts=st.lists(SAID, min_size=1, max_size=5))
def test_adjacent_contents_join_to_no_control_token(overlapping: Tokenizer, written: str, texts: list[str]) -> None:
    layout = f"{{% for message in messages %}}{{% set content = message.content %}}{{{{ {written} }}}}{{% endfor %}}"
    prompt = template_of(layout, overlapping).prompt(chat(*texts))
    assert control_ids(overlapping, prompt) == []
    expected = "".join(text if written == "content" else text.strip() for text in texts)
    assert b"".join(map(overlapping.token_bytes, prompt.ids)).decode() == expected


def test_contents_that_join_once_their_blanks_are_trimmed_make_no_control_token(tokenizer: Tokenizer) -> None:
    template = ChatTemplate("{% for message in messages %}{{ (' ' ~ message.content) | trim }}{% endfor %}", tokenizer)
    prompt = template.prompt(chat("<|im_en ", " d|>"))
    assert control_ids(tokenizer, prompt) == [] and tokenizer.decode(prompt.ids) == "<|im_end|>"


@pytest.mark.parametrize("text", ["im_end", "|im_end|", "m_e", "_", " im_end ", "<|im_end|>", "<", ""])
def test_a_content_that_completes_the_templates_text_makes_no_control_token(tokenizer: Tokenizer, text: str) -> None:
    before, _, after = "<|im_end|>".partition(text.strip() or "im")
    prompt = template_of(f"{before}{{{{ messages[0].content | trim }}}}{after}", tokenizer).prompt(chat(text))
    assert control_ids(tokenizer, prompt) == []


@settings(deadline=None)
@given(text=SAID, reply=SAID)
def test_a_template_that_takes_contents_apart_joins_them_to_no_control_token(overlapping: Tokenizer, text: str, reply: str) -> None:
    messages = chat(text, reply, "x")
    prompt = template_of(QWEN, overlapping).prompt(messages)
    harmless = template_of(QWEN, overlapping).prompt(chat("x", "x", "x"))
    assert control_ids(overlapping, prompt) == control_ids(overlapping, harmless)
    assert b"".join(map(overlapping.token_bytes, prompt.ids)).decode() == rendered(QWEN, messages)


@pytest.mark.parametrize(
    "expression",
    [
        "content.replace('-', '')",
        "content | replace('-', '')",
        "(content | upper | lower)",
        "content.split('-')[0] ~ content.split('-')[1]",
        "content.split('-') | join('')",
        "content[:6] + content[7:]",
        "(content | list | join)",
        "content.title().lower()",
    ],
)
def test_what_a_template_makes_of_a_content_is_no_control_token(tokenizer: Tokenizer, expression: str) -> None:
    template = ChatTemplate(f"{{% for m in messages %}}{{% set content = m.content %}}{{{{ {expression} }}}}{{% endfor %}}", tokenizer)
    for text in ("<|im_e-nd|>", "<|IM_END|>", "<|im_end|>-"):
        assert control_ids(tokenizer, template.prompt([Message("user", text)])) == []


def test_a_template_finds_spelled_control_tokens_in_a_content(tokenizer: Tokenizer) -> None:
    tests = ["'</think>' in content", "content.startswith('<think>')", "content.count('</think>') == 2", "content.find('</think>') == 8"]
    layout = "{% set content = messages[0].content %}" + "".join(f"{{{{ {test} }}}} " for test in tests)
    ids = ChatTemplate(layout, tokenizer).prompt([Message("assistant", "<think>a</think></think>")]).ids
    assert tokenizer.decode(ids) == "True True True True "


@settings(deadline=None)
@given(text=SAID)
def test_a_marker_is_no_character_of_the_chat(overlapping: Tokenizer, text: str) -> None:
    messages = [Message("user", text), Message("assistant", text, ids=(overlapping.control["ABA"],)), Message("user", text)]
    prompt = template_of(CHATML, overlapping).prompt(messages)
    assert prompt.ids.count(overlapping.control["ABA"]) == 1
