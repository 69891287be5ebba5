"""A prompt that ends inside the chat's last message, as transformers' `continue_final_message` has it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from transformers import PreTrainedTokenizerFast

from engine.chat_template import ChatTemplate
from engine.core import Ending, Message, RequestError
from engine.tokenizer import Tokenizer
from tests.engine.chats import CHATML, CHATS, LAYOUTS, LLAMA2, QWEN, SAID, WORDS, bytes_tokenizer, chat, control_ids, reply, template_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bytes")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return bytes_tokenizer(folder)


@pytest.fixture(scope="module")
def oracle(folder: Path, tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), clean_up_tokenization_spaces=False)


GONE_ON_WITH = [
    *(messages[: 2 * (len(messages) // 2)] if messages[0].role == "user" else messages for messages in CHATS[1:6]),
    chat("hello", "The answer is", system="Be brief"),
    chat("hello", "  two lines\n\nof it \n"),
    chat("hello"),
    chat("a", "the same", "b", "the same"),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("number", range(len(GONE_ON_WITH)))
def test_the_last_message_goes_on_as_in_transformers(
    tokenizer: Tokenizer, oracle: PreTrainedTokenizerFast, layout: str, number: int
) -> None:
    messages = GONE_ON_WITH[number]
    rows = [{"role": message.role, "content": message.text} for message in messages]
    options = {"chat_template": LAYOUTS[layout], "continue_final_message": True, "tokenize": True, "return_dict": False, **WORDS}
    assert template_of(LAYOUTS[layout], tokenizer).prompt(messages, ending=Ending.CONTINUE).ids == oracle.apply_chat_template(
        rows, **options
    )


def test_a_message_without_text_goes_on_where_its_text_would_begin(tokenizer: Tokenizer) -> None:
    for layout in LAYOUTS:
        template = template_of(LAYOUTS[layout], tokenizer)
        full, empty = (template.prompt(chat("hello", text), ending=Ending.CONTINUE).ids for text in ("x", ""))
        assert tokenizer.decode(full) == tokenizer.decode(empty) + "x"


@settings(deadline=None)
@given(text=SAID, last=SAID)
def test_no_control_token_comes_of_a_message_that_goes_on(tokenizer: Tokenizer, text: str, last: str) -> None:
    template = template_of(CHATML, tokenizer)
    prompt = template.prompt(chat(text, last), ending=Ending.CONTINUE)
    assert control_ids(tokenizer, prompt) == control_ids(tokenizer, template.prompt(chat("x", "y"), ending=Ending.CONTINUE))
    assert b"".join(map(tokenizer.token_bytes, prompt.ids)).decode().endswith(f"assistant\n{last}")


def test_a_reply_that_goes_on_keeps_its_tokens(tokenizer: Tokenizer) -> None:
    for layout in (CHATML, LLAMA2):
        template = template_of(layout, tokenizer)
        first = template.prompt(chat("hello"))
        again = template.prompt([*chat("hello"), reply(first, "one ", [300, 301])], ending=Ending.CONTINUE)
        assert again.ids == [*first.ids, 300, 301] and again.ends == (len(first.ids), len(again.ids))
        assert (again.lead_ids, again.lead_digest, again.goes_on) == ((*first.lead_ids, 300, 301), first.lead_digest, True)
        later = template.prompt([*chat("hello"), reply(first, "one two", [300, 301, 302]), Message("user", "b")])
        assert later.ids[: len(again.ids) + 1] == [*again.ids, 302]


@pytest.mark.parametrize(
    ("layout", "messages"),
    [
        ("{{ messages[0].content }}", chat("a", "b")),  # left out
        ("{{ messages[0].content }}", [*chat("a"), Message("assistant", "b", ids=(300,))]),
        ("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}", chat("a", "b")),  # which of them?
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", chat("a", "the same")),
        (QWEN, chat("a", "<think>b</think>c")),
    ],
)
def test_a_last_message_that_the_template_changes_is_refused(tokenizer: Tokenizer, layout: str, messages: list[Message]) -> None:
    with pytest.raises(RequestError, match="writes as it is") as caught:
        template_of(layout, tokenizer).prompt(messages, ending=Ending.CONTINUE)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("role", ["tool", "system"])
def test_only_what_user_or_assistant_say_goes_on(tokenizer: Tokenizer, role: str) -> None:
    with pytest.raises(RequestError, match=f"user or assistant to go on with, got one of '{role}'"):
        ChatTemplate(CHATML, tokenizer).prompt([*chat("a"), Message(role, "b")], ending=Ending.CONTINUE)


@pytest.mark.slow
def test_the_default_models_replies_go_on_as_in_transformers() -> None:
    from engine.weights.convert import prepare

    checkpoint = prepare("default")
    template = ChatTemplate(checkpoint.template, Tokenizer(checkpoint.tokenizer_path, checkpoint.eos_ids), **checkpoint.special_tokens)
    oracle = PreTrainedTokenizerFast(tokenizer_file=str(checkpoint.tokenizer_path), **checkpoint.special_tokens)
    for messages in GONE_ON_WITH:
        rows = [{"role": message.role, "content": message.text} for message in messages]
        expected = oracle.apply_chat_template(
            rows, chat_template=checkpoint.template, continue_final_message=True, tokenize=True, return_dict=False
        )
        assert template.prompt(messages, ending=Ending.CONTINUE).ids == expected


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "qwen"])  # which writes a last message in its own way
@pytest.mark.parametrize("said", ["The answer is", "two lines\n\nof it", " blanks ", "\n"])
def test_what_went_on_is_run_as_it_was_in_the_next_turn(tokenizer: Tokenizer, layout: str, said: str) -> None:
    """E10: the message that a client then has is the two together, and would be encoded otherwise."""
    template = template_of(LAYOUTS[layout], tokenizer)
    messages = chat("hello", "first", "more", said)
    prompt = template.prompt(messages, ending=Ending.CONTINUE)
    assert prompt.goes_on or not said.strip(), "only blanks may not be told apart"
    if prompt.goes_on:
        whole = Message("assistant", said + "..", prompt.lead_ids, prompt.lead_digest, (300, 301))
        later = template.prompt([*messages[:-1], whole, Message("user", "and then?")])
        assert later.ids[: len(prompt.ids) + 2] == [*prompt.ids, 300, 301]


def test_what_a_person_says_on_is_no_reply(tokenizer: Tokenizer) -> None:
    assert not template_of(CHATML, tokenizer).prompt(chat("hello"), ending=Ending.CONTINUE).goes_on
