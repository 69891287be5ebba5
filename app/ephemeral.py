"""Keys that live for minutes: a page's own server asks for one, so that the page never holds a key that lasts.

Owns the keys that were issued and are not yet over; they end with the process. Knows neither requests nor what a session means.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

PREFIX = "ek_"
LIMIT = 10_000  # of one owner's at a time


@dataclass(slots=True, frozen=True)
class EphemeralKey:
    value: str = field(repr=False)  # what is sent back, `ek_...`
    owner: str  # whose key asked for it
    expires_at: int  # seconds since the epoch; from then on it is unknown
    session: dict[str, Any] = field(repr=False)  # what it was issued for; read only


class EphemeralKeys:
    def __init__(self, limit: int = LIMIT, clock: Callable[[], float] = time.time) -> None:
        """limit: of keys that an owner may have at a time: one more, and its oldest is dropped. clock: seconds since the epoch."""
        self._limit = limit
        self._clock = clock
        self._of: dict[str, dict[bytes, EphemeralKey]] = {}  # owner -> digest -> key, in the order of issue

    def issue(self, owner: str, session: dict[str, Any], seconds: float) -> EphemeralKey:
        """A new key, good for `seconds`."""
        now = self._clock()
        kept = {digest: key for digest, key in self._of.get(owner, {}).items() if now < key.expires_at}
        while len(kept) >= self._limit:
            del kept[next(iter(kept))]
        key = EphemeralKey(f"{PREFIX}{secrets.token_hex(24)}", owner, int(now + seconds), session)
        kept[_digest(key.value)] = key
        self._of[owner] = kept
        return key

    def find(self, value: str) -> EphemeralKey | None:
        """The key that was issued as `value`, until it expires."""
        # Looking up a digest takes no longer for a value that is nearly right: who guesses learns nothing from the time it took.
        digest = _digest(value)
        found = None
        for keys in self._of.values():
            key = keys.get(digest)
            if key is not None and hmac.compare_digest(key.value.encode(), value.encode("utf-8", "surrogatepass")):
                found = key
        return found if found is not None and self._clock() < found.expires_at else None


def _digest(value: str) -> bytes:
    return hashlib.sha256(value.encode("utf-8", "surrogatepass")).digest()
