"""Where the messages of a prompt end, told exactly and measured."""

from __future__ import annotations

import pytest

from engine.chat_template import ChatTemplate
from engine.core import Message
from engine.tokenizer import Place, Tokenizer
from tests.engine.chats import CHATML, CHATS, LAYOUTS, bytes_tokenizer, chat, reply, template_of


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return bytes_tokenizer(tmp_path_factory.mktemp("bytes"))


def test_a_prompt_says_where_its_messages_end(tokenizer: Tokenizer) -> None:
    template = ChatTemplate(CHATML, tokenizer)
    messages, ends = chat("hello", system="Be brief"), []
    for number in range(3):
        prompt = template.prompt(messages)
        ends = [*ends, len(prompt.ids)]
        assert prompt.ends == (0, *ends), "the system message is not told apart from the question after it"
        messages += [reply(prompt, "\n\n", [300] * number), Message("user", "and?")]
        ends += [len(prompt.ids) + number]


def test_messages_that_a_template_drops_or_moves_leave_the_ends_in_order(tokenizer: Tokenizer) -> None:
    one, two = Message("assistant", "one", ids=(300,)), Message("assistant", "two", ids=(301, 302))
    quoted = len(tokenizer.encode_plain("oneone"))
    for layout, expected in (
        ("{{ messages[1].content }}", (0, 1, 1, 1)),
        ("{{ messages[2].content }}{{ messages[1].content }}", (2, 3, 3, 3)),
        ("{{ messages[1].content }}{{ messages[1].content }}{{ messages[2].content }}", (0, quoted, quoted + 2, quoted + 2)),
    ):
        assert ChatTemplate(layout, tokenizer).prompt([Message("user", "q"), one, two, Message("user", "r")]).ends == expected


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("number", range(len(CHATS)))
def test_a_measured_chat_is_as_long_as_its_prompt_within_a_few_tokens(tokenizer: Tokenizer, layout: str, number: int) -> None:
    template, messages = template_of(LAYOUTS[layout], tokenizer), CHATS[number]
    for count in range(1, len(messages) + 1):
        if layout == "llama2" and messages[count - 1].role == "system":
            continue  # it takes no such chat
        ends = template.measure(messages[:count], 1000)
        assert len(ends) == count and list(ends) == sorted(ends)
        more = ends[-1] - len(template.prompt(messages[:count]).ids)
        assert -4 * count <= more <= 4 * count or (more > 0 and any("<think>" in message.text for message in messages))


def test_what_was_measured_stays_as_it_was_when_the_chat_goes_on(tokenizer: Tokenizer) -> None:
    template = ChatTemplate(CHATML, tokenizer)
    unknown = chat("hello world", "the world", "12345", "don't", "日本語", system="the system")
    first = template.prompt(chat("hello", system="s"))
    known = [*chat("hello", system="s"), reply(first, "hello", [300, 301]), *chat("12 or 3?", "  ", "def")]
    for messages in (unknown, known):
        whole = template.measure(messages, 1000)
        for count, message in enumerate(messages[:-1]):
            if message.role == "user":
                assert template.measure(messages[: count + 1], 1000) == whole[: count + 1]


def test_measuring_reads_nothing_that_was_run_nor_what_is_too_long(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate(CHATML, tokenizer)
    first = template.prompt(chat("the first"))
    messages = [*chat("the first"), reply(first, "one", [300]), Message("user", "x" * 10_000)]
    encoded, real = [], tokenizer.encode_plain

    def watched(self: Tokenizer, text: str, place: Place) -> list[int]:
        encoded.append(text)
        return real(text, place)

    monkeypatch.setattr(Tokenizer, "encode_plain", watched)
    ends = template.measure(messages, 100)
    assert ends[:2] == (len(first.ids), len(first.ids) + 1) and ends[2] > ends[1] + 100
    assert not any("first" in text or "x" in text for text in encoded)
