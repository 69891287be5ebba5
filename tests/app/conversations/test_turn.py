"""What a turn may reply to in place of what it follows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.conversations.errors import ConversationError
from app.conversations.service import Conversations
from app.conversations.turn import Said, reply_of, response_of, said_again
from app.store.records import Asked, Item
from engine.tool_calls import call_text
from tests.app.conversations.asking import text_of, turn

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_reply_to_something_else_is_added_to_its_conversation_all_the_same(conversations: Conversations) -> None:
    thread = await conversations.threads.create("ana", {}, [Said("user", "what was said before")])
    context = (Said("user", "hello you"),)
    aside = await conversations.submit(replace(turn(conversation=thread.id), items=[], context=context))
    alone = await conversations.submit(turn("hello you", owner="ben"))
    assert await text_of(aside) == await text_of(alone)
    assert [item.text for item in await conversations.threads.items("ana", thread.id)] == ["what was said before", aside.reply.text]


async def test_what_is_said_again_is_the_same_chat(conversations: Conversations) -> None:
    said = [Said("user", "hi"), Said("assistant", call_text("look", "{}"), ("c1",)), Said("tool", "4", call_id="c1"), Said("user", "so")]
    thread = await conversations.threads.create("ana", {}, said)
    assert [said_again(item) for item in await conversations.threads.items("ana", thread.id)] == said


async def test_a_reply_is_said_again_as_a_client_was_told_it() -> None:
    call = call_text("look", "{}")
    reply = Item(id="msg_1f", parent=None, role="assistant", text=f"I look. \n\n{call}", created_at=0, response="resp_1f", calls=True)
    assert said_again(reply) == Said("assistant", f"I look.\n{call}", ("call_1f_0",))


async def test_a_conversation_may_be_given_its_id(conversations: Conversations) -> None:
    thread = await conversations.threads.create("ana", {}, id="conv_chosen")
    assert thread.id == "conv_chosen"
    assert (await conversations.threads.conversation("ana", "conv_chosen")).listed


async def test_settings_that_cannot_be_kept_are_refused_before_anything_is_written(conversations: Conversations) -> None:
    deep: dict[str, object] = {}
    for _ in range(5000):
        deep = {"a": deep}
    for schema in (deep, {"maximum": 1 << 80}):
        with pytest.raises(ConversationError, match="can be stored"):
            await conversations.submit(turn(request=Asked(text={"schema": schema})))


async def test_a_reply_and_its_response_name_each_other() -> None:
    assert response_of(reply_of("resp_1f")) == "resp_1f"
