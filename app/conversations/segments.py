"""What replies were run as, for clients that send their whole chat with every request.

Owns a memory, bounded in tokens, from a chat's text up to the end of a reply to the tokens that reply was generated as. An assistant
message of such a client is looked up here, and what is found is run as it was, not tokenised again: about one sampled reply in three would
encode differently. Knows no store and no engine, and rests on nothing a client says but the text, and the calls.
It is of this process alone, unless it is given a file: then what it adds is appended there before anyone sees the reply's end, and it
begins with what the file holds, so that KV that outlives a restart is found by these clients too.

The key is a hash of the owner and of the whole chat up to the reply, so the same words said elsewhere are another reply. There is no key
of a reply's own text alone to fall back on: what it finds would depend on what other chats said meanwhile, so turn N + 1 could change
what turn N ran. For the same reason what is kept first stays, and `Segment.after` says which replies before one were run by their tokens
and which, unknown at the time, by their text: what is found is found as it was.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec.structs import replace

from app.conversations.calls import as_told
from app.store.records import Item
from engine.core import Prompt

if TYPE_CHECKING:
    from app.conversations.segment_file import SegmentFile

MOST_TOKENS = 1 << 21  # of four bytes
ENTRY_TOKENS = 128  # what an entry without any takes up


@dataclass(slots=True, frozen=True)
class Segment:
    """A reply's tokens, and those of the prompt before it, as an `Item` has them."""

    lead_ids: array[int]
    lead_digest: bytes
    ids: array[int]
    after: int  # index, among the chat's messages, of the reply that `lead_ids` follow; -1: none, they are the prompt's front

    @property
    def tokens(self) -> int:
        return ENTRY_TOKENS + len(self.lead_ids) + len(self.ids)


@dataclass(slots=True)
class Chat:
    """A chat that is about to be replied to."""

    fingerprint: str  # of the tokenizer and template it is run with
    hash: hashlib.blake2b  # of all that was said
    before: hashlib.blake2b | None = None  # the same, without the last message
    items: list[Item | None] = field(default_factory=list)  # one for each message of the chat; None: the tools, the instructions
    keys: dict[int, bytes] = field(default_factory=dict)  # of each assistant message, by its index, oldest first

    def add(self, items: Sequence[Item]) -> None:
        for item in items:
            if item.spoken:
                self.say(item.role, as_told(item), item)

    def say(self, role: str, text: str, item: Item | None = None) -> None:
        self.before = self.hash.copy()
        _update(self.hash, role, text)
        if role == "assistant":
            self.keys[len(self.items)] = self.hash.digest()
        self.items.append(item)


class Segments:
    def __init__(self, most_tokens: int = MOST_TOKENS, file: SegmentFile | None = None) -> None:
        """With a `file`, it is read, and what is added is appended to it; it holds at most about twice `most_tokens`."""
        self._most = most_tokens
        self._file = file
        self._tokens = 0  # kept
        # The least recently used first; of a chat, a reply before those it follows, so that what is left of it is a beginning.
        self._kept: OrderedDict[bytes, Segment] = OrderedDict()
        if file:
            self._load(file)

    def recall(
        self, owner: str, fingerprint: str, instructions: str | None, path: Sequence[Item], new: Sequence[Item], tools: str = ""
    ) -> Chat:
        """Give the replies among `new` the tokens they are known by, in place. `tools`: what the model may call, spelled out.

        `path`, what the ledger has before them, is as it was run: what came without tokens then was looked up in vain, and stays text.
        """
        chat = Chat(fingerprint, hashlib.blake2b(digest_size=32))
        _update(chat.hash, owner, fingerprint)
        if tools:
            chat.say("tools", tools)  # no role: nothing that is said can be mistaken for them
        if instructions:
            chat.say("system", instructions)
        chat.add(path)
        oldest = len(chat.items)
        chat.add(new)
        at = len(chat.items) - 1
        while at >= oldest:
            item, segment = chat.items[at], self._kept.get(chat.keys.get(at, b""))
            if item is None or segment is None:
                at -= 1
                continue
            item.lead_ids, item.lead_digest, item.ids = list(segment.lead_ids), segment.lead_digest, list(segment.ids)
            item.fingerprint = fingerprint
            at = min(segment.after, at - 1)
        self._touch(chat.keys.values())
        return chat

    def keep(self, chat: Chat, reply: Item, whole: Prompt | None = None) -> None:
        """Remember the reply that `chat` has got, and with it the replies that it follows. One without text is no message.

        whole: the prompt, if the reply is the rest of the chat's last message, of which the client makes one.
        """
        if not reply.text or reply.ids is None:
            return
        said, before = chat.hash.copy(), len(chat.items)
        if whole and chat.before and (last := chat.items[-1]):
            said, before = chat.before.copy(), before - 1
            reply = replace(reply, text=last.text + reply.text, lead_ids=list(whole.lead_ids), lead_digest=whole.lead_digest)
        after = -1
        for index, key in chat.keys.items():
            item = chat.items[index] if index < before else None
            if item and item.ids is not None and item.fingerprint == chat.fingerprint:
                self._add(key, item, after)
                after = index
        _update(said, "assistant", as_told(reply))
        self._add(said.digest(), reply, after)
        self._touch(chat.keys.values())
        self._forget()
        if self._file and self._file.tokens > 2 * self._most:
            self._file.rewrite(self._kept.items())

    def _load(self, file: SegmentFile) -> None:
        for key, segment in file.read():
            if again := self._kept.pop(key, None):  # it was forgotten, then said again: the last is what was run since
                self._tokens -= again.tokens
            self._kept[key] = segment
            self._tokens += segment.tokens
            self._forget()
        if file.tokens > 2 * self._tokens:
            file.rewrite(self._kept.items())

    def _forget(self) -> None:
        while self._tokens > self._most:
            _, dropped = self._kept.popitem(last=False)
            self._tokens -= dropped.tokens

    def _add(self, key: bytes, reply: Item, after: int) -> None:
        if key not in self._kept and reply.ids is not None:
            segment = self._kept[key] = Segment(array("I", reply.lead_ids), reply.lead_digest, array("I", reply.ids), after)
            self._tokens += segment.tokens
            if self._file:
                self._file.append(key, segment)

    def _touch(self, keys: Iterable[bytes]) -> None:
        for key in reversed(list(keys)):
            if key in self._kept:
                self._kept.move_to_end(key)


def _update(hash: hashlib.blake2b, *fields: str) -> None:
    """Each field with its length, so that none can be mistaken for a part of another."""
    for text in fields:
        data = text.encode(errors="surrogatepass")  # a lone surrogate is refused later, by those who tokenise
        hash.update(len(data).to_bytes(8, "little"))
        hash.update(data)
