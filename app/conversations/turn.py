"""A turn: what a client asks for, what it follows, and the records it becomes.

Pure. Knows no store, no batcher and no wire format.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec
from msgspec.structs import replace

from app.conversations.calls import as_told, call_ids
from app.conversations.errors import ConversationError
from app.store import IDEMPOTENCY_SECONDS
from app.store.records import Asked, Conversation, Item, Response, Role, Usage
from engine.core import Ending, Prompt, SamplingParams, Tool

TITLE_CHARACTERS = 80


@dataclass(slots=True, frozen=True)
class Said:
    """A new item of a conversation, as a client brings it."""

    role: Role
    text: str  # a reply's calls are text in the markup of `engine.tool_calls`
    call_ids: tuple[str, ...] = ()  # a reply's: how the client names the calls in it
    call_id: str | None = None  # a tool's: of the call that it answers


@dataclass(slots=True, frozen=True, kw_only=True)
class Turn:
    """What a client asks for: new items after what exists, and how to answer them."""

    owner: str
    items: list[Said]
    sampling: SamplingParams  # max_tokens 0: to the end of the context
    instructions: str | None = None
    previous: str | None = None  # the response it follows
    context: tuple[Said, ...] | None = None  # what is replied to in place of what it follows; such a turn brings no items
    conversation: str | None = None  # the conversation it is added to
    client_message_id: str | None = None
    asked_digest: bytes = b""  # of all that is asked for, if it has a client message id: another turn with the same id is no repeat
    stored: bool = True  # False: its records go to the caller's scratch shelf
    lasting: bool = True  # False: it is stored for as long as its client message id finds it
    truncation: Literal["auto", "disabled"] = "disabled"  # a chat too long for the context: without its oldest turns (auto), or refused
    background: bool = False  # nobody waits for it: interactive turns go first
    tools: tuple[Tool, ...] = ()  # that the model may call
    ending: Ending = Ending.REPLY
    generate: bool = True  # False: the prompt is read, so that the next turn finds it, and the reply is empty
    raw: str | tuple[int, ...] | None = None  # a prompt as it is, text or token ids, in place of a chat; for turns that are not stored
    request: Asked = field(default_factory=Asked)

    def check(self) -> None:
        """What is wrong with it whatever it follows. Raises: ConversationError"""
        try:
            msgspec.msgpack.encode(self.request)
        except (ValueError, OverflowError, RecursionError) as fault:  # in what a schema or a tool's parameters may hold
            raise ConversationError(f"expected settings that can be stored, got others: {fault}", code="unsupported_value") from None
        if self.raw is not None:
            return
        said = any(item.text or item.role == "tool" for item in self.items)
        goes_on = not self.items and (self.conversation or self.previous or (not self.generate and self.instructions))
        answerable = said or self.context is not None or goes_on
        if not all(item.text for item in self.items if item.role == "user") or not answerable:
            raise ConversationError("expected input of at least one message with text, got an empty one", "input")
        if self.previous is not None and self.conversation is not None:
            raise ConversationError("expected previous_response_id or conversation, got both", "conversation")
        if self.conversation is not None and not self.stored:
            raise ConversationError("expected store: true for a turn of a conversation, got store: false", "store")
        if self.client_message_id and not self.stored:
            raise ConversationError("expected store: true with a client message id or idempotency key, got store: false", "store")


@dataclass(slots=True, frozen=True)
class Place:
    """What a turn follows."""

    conversation: Conversation
    path: list[Item]  # oldest first
    new: bool = False  # the conversation, and the path's items, are still to be written to the turn's shelf

    @property
    def leaf(self) -> str | None:
        return self.path[-1].id if self.path else None


@dataclass(slots=True, frozen=True)
class Draft:
    """A turn's records, not yet written."""

    conversation: Conversation
    response: Response
    items: list[Item]  # all that is to be written beside the reply
    reply: Item  # as begun: without text


def new_items(said: Sequence[Said], parent: str | None, response: str = "") -> list[Item]:
    """What was said as items of the ledger, the first after `parent`, each after the one before. `response`: that brings them in."""
    now = time.time()
    items: list[Item] = []
    for one in said:
        item = Item(
            id=new_id("msg"),
            parent=parent,
            role=one.role,
            text=one.text,
            created_at=now,
            response=response,
            calls=bool(one.call_ids),
            call_ids=list(one.call_ids),
            call_id=one.call_id,
        )
        items.append(item)
        parent = item.id
    return items


def said_again(item: Item) -> Said:
    """An item of the ledger, to be said in another chat."""
    return Said(item.role, as_told(item), tuple(call_ids(item)), item.call_id)


def draft(turn: Turn, place: Place, response_id: str, items: list[Item], prompt: Prompt, fingerprint: str) -> Draft:
    """The records of a turn whose prompt is `prompt`, under the fingerprint of its tokenizer and template."""
    now = time.time()
    reply = Item(
        id=reply_of(response_id),
        parent=items[-1].id if items else place.leaf,
        role="assistant",
        text="",
        created_at=now,
        response=response_id,
        status="in_progress",
        lead_ids=[] if prompt.goes_on else list(prompt.lead_ids),  # the ledger has the message that it goes on with apart
        lead_digest=b"" if prompt.goes_on else prompt.lead_digest,
        fingerprint=fingerprint,
        calls=bool(turn.tools),
    )
    response = Response(
        id=response_id,
        owner=turn.owner,
        conversation=place.conversation.id,
        previous=turn.previous,
        input=[item.id for item in items],
        output=reply.id,
        created_at=now,
        request=turn.request,
        client_message_id=turn.client_message_id,
        asked_digest=turn.asked_digest,
        expires_at=None if turn.lasting else now + IDEMPOTENCY_SECONDS,
        usage=Usage(prompt_tokens=len(prompt.ids)),
    )
    title = place.conversation.title or title_of(turn.items)
    conversation = replace(place.conversation, leaf=reply.id, updated_at=now, title=title)
    return Draft(conversation, response, [*place.path, *items] if place.new else items, reply)


def new_conversation(owner: str, *, listed: bool, metadata: dict[str, str] | None = None, id: str | None = None) -> Conversation:
    now = time.time()
    return Conversation(id=id or new_id("conv"), owner=owner, created_at=now, updated_at=now, listed=listed, metadata=metadata or {})


def new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(16)}"


def reply_of(response_id: str) -> str:
    """The id of a response's reply: each is found by the other's."""
    return f"msg_{response_id.partition('_')[2]}"


def response_of(reply_id: str) -> str:
    return f"resp_{reply_id.partition('_')[2]}"


def title_of(said: Sequence[Said]) -> str:
    """The beginning of what a person said first."""
    text = next((one.text for one in said if one.role == "user"), "")
    return " ".join(text[: 4 * TITLE_CHARACTERS].split())[:TITLE_CHARACTERS]
