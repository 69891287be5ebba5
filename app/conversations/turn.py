"""A turn: what a client asks for, what it follows, and the records it becomes.

Pure. Knows no store, no batcher and no wire format.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from typing import Any, Literal

from msgspec.structs import replace

from app.conversations.errors import ConversationError
from app.store.records import Conversation, Item, Response, Role, Usage
from engine.core import Prompt, SamplingParams

TITLE_CHARACTERS = 80


@dataclass(slots=True, frozen=True, kw_only=True)
class Turn:
    """What a client asks for: new items after what exists, and how to answer them."""

    owner: str
    items: list[tuple[Role, str]]  # role and text of each new item
    sampling: SamplingParams  # max_tokens 0: to the end of the context
    instructions: str | None = None
    previous: str | None = None  # the response it follows
    conversation: str | None = None  # the conversation it is added to
    client_message_id: str | None = None
    stored: bool = True  # False: its records go to the caller's scratch shelf
    truncation: Literal["auto", "disabled"] = "disabled"  # a chat too long for the context: without its oldest turns (auto), or refused
    background: bool = False  # nobody waits for it: interactive turns go first
    request: dict[str, Any] = field(default_factory=dict)  # the adapter's echo of the request

    def check(self) -> None:
        """What is wrong with it whatever it follows. Raises: ConversationError"""
        if not any(text for _, text in self.items) or not all(text for role, text in self.items if role == "user"):
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
    copied: bool = False  # the path's items are still to be written to the turn's shelf

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


def new_items(turn: Turn, place: Place) -> list[Item]:
    """The turn's input as items of the ledger, each after the one before."""
    parent, now = place.leaf, time.time()
    response = new_id("resp")
    items: list[Item] = []
    for role, text in turn.items:
        items.append(Item(id=new_id("msg"), parent=parent, role=role, text=text, created_at=now, response=response))
        parent = items[-1].id
    return items


def draft(turn: Turn, place: Place, items: list[Item], prompt: Prompt, fingerprint: str) -> Draft:
    """The records of a turn whose prompt is `prompt`, under the fingerprint of its tokenizer and template."""
    last = items[-1]
    reply = Item(
        id=new_id("msg"),
        parent=last.id,
        role="assistant",
        text="",
        created_at=last.created_at,
        response=last.response,
        status="in_progress",
        lead_ids=list(prompt.lead_ids),
        lead_digest=prompt.lead_digest,
        fingerprint=fingerprint,
    )
    response = Response(
        id=last.response,
        owner=turn.owner,
        conversation=place.conversation.id,
        previous=turn.previous,
        input=[item.id for item in items],
        output=reply.id,
        created_at=last.created_at,
        request=turn.request,
        client_message_id=turn.client_message_id,
        usage=Usage(prompt_tokens=len(prompt.ids)),
    )
    title = place.conversation.title or _title(turn)
    conversation = replace(place.conversation, leaf=reply.id, updated_at=last.created_at, title=title)
    return Draft(conversation, response, [*place.path, *items] if place.copied else items, reply)


def new_conversation(owner: str, *, listed: bool, metadata: dict[str, str] | None = None) -> Conversation:
    now = time.time()
    return Conversation(id=new_id("conv"), owner=owner, created_at=now, updated_at=now, listed=listed, metadata=metadata or {})


def new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(16)}"


def _title(turn: Turn) -> str:
    text = next((text for role, text in turn.items if role == "user"), "")
    return " ".join(text[: 4 * TITLE_CHARACTERS].split())[:TITLE_CHARACTERS]
