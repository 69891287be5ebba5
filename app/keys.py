"""API keys: whose they are, where they are written down, and where a request carries one.

Owns reading and comparing them. A key is never logged, shown or made part of an error.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.types import Scope

from app.ephemeral import PREFIX, EphemeralKey, EphemeralKeys

LOCAL_OWNER = "local"  # everyone, where no keys are asked for
KEY_SUBPROTOCOL = "openai-insecure-api-key."  # followed by the key: the one place where a browser's WebSocket can put it
EPHEMERAL_PATH = "/v1/realtime"  # the one WebSocket that ephemeral keys open

_KEY = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", re.ASCII)  # what may stand in a WebSocket subprotocol (RFC 9110, token)
LEAST_CHARACTERS = 16  # of a key that is given by itself: what is shorter is more likely the name of a file, mistyped
_EXTENSION = re.compile(r"\.[A-Za-z]{1,8}\Z")
_KEY_IS = "letters, digits and !#$%&'*+.^_`|~- only (`openssl rand -hex 32` makes one)"


class KeyRefusedError(Exception):
    """No API key, or none that is known. The message never holds what was offered."""


@dataclass(slots=True, frozen=True)
class Caller:
    owner: str
    ephemeral: EphemeralKey | None = None  # that it came with


class Keys:
    """The API keys and their owners. Without any, everyone is the owner `local`."""

    def __init__(self, owners: Mapping[str, str], ephemeral: EphemeralKeys | None = None) -> None:
        """owners: key -> owner; several keys may have one owner. ephemeral: those that open EPHEMERAL_PATH beside them."""
        self._owners = [(_digest(key), owner) for key, owner in owners.items()]
        self._ephemeral = ephemeral

    def caller(self, scope: Scope) -> Caller:
        """Whose key the request carries: as Bearer, in `api-key`, or in an offered subprotocol. Raises: KeyRefusedError."""
        offered = _offered_keys(scope)
        brief = self._brief(scope, offered)
        ephemeral = next((key for key in brief if key is not None), None)
        if ephemeral is not None:
            return Caller(ephemeral.owner, ephemeral)
        if not self._owners:
            if brief:  # a page would be let in without the session that its key is for
                raise KeyRefusedError("expected an ephemeral key that is not over, got one that is, or that is not known here")
            return Caller(LOCAL_OWNER)
        if not offered:
            raise KeyRefusedError("expected an API key (Authorization: Bearer KEY), got none")
        found = None
        for digest in map(_digest, offered):
            for known, owner in self._owners:  # all of them, always: the time taken tells nothing
                if hmac.compare_digest(known, digest):
                    found = owner
        if found is None:
            raise KeyRefusedError("expected a valid API key, got one that is not known here")
        return Caller(found)

    def _brief(self, scope: Scope, offered: list[str]) -> list[EphemeralKey | None]:
        """Each ephemeral key that is offered where one may be; None: it is not known, or not any more."""
        if self._ephemeral is None or scope["type"] != "websocket" or scope["path"] != EPHEMERAL_PATH:
            return []
        return [self._ephemeral.find(key) for key in offered if key.startswith(PREFIX)]


class KeyFileError(ValueError):
    """Keys that cannot be used; says where they are written, never which they are."""


def gather_keys(sources: Iterable[str]) -> dict[str, str]:
    """Key -> owner from sources that are each a key, or a file of keys (see `read_keys`).

    A source with a path separator, or the name of a file that exists, is a file; anything else is a key, if it is long enough to be one and
    has no file's extension. Such a key's owner is named by its digest, so that it stays the same whatever keys there are beside it.

    Raises: KeyFileError.
    """
    owners: dict[str, str] = {}
    seen: dict[str, str] = {}  # key -> where
    for number, source in enumerate(sources, 1):
        if _is_file(source):
            found = [(key, owner, f"{source}, line {line}") for key, owner, line in _read(Path(source).expanduser())]
        elif _KEY.fullmatch(source) is None:
            raise KeyFileError(f"key {number}: expected the path of a file, or a key of {_KEY_IS}")
        elif len(source) < LEAST_CHARACTERS or _EXTENSION.search(source):
            raise KeyFileError(
                f"key {number}: expected a file that exists (`key owner` on each line), or a key of at least {LEAST_CHARACTERS} characters "
                "that does not end like a file's name: got neither"
            )
        else:
            found = [(source, f"key-{_digest(source).hex()[:12]}", f"key {number}")]
        for key, owner, where in found:
            if key in owners:
                raise KeyFileError(f"{where}: the key of {seen[key]} again")
            owners[key], seen[key] = owner, where
    return owners


def _is_file(source: str) -> bool:
    if any(separator in source for separator in (os.sep, os.altsep) if separator):
        return True
    try:
        return Path(source).exists()
    except OSError:  # longer than any file's name
        return False


def _read(path: Path) -> list[tuple[str, str, int]]:
    """Key, owner and line from a file with `key owner` on each line; empty lines and those that begin with `#` are skipped.

    Raises: KeyFileError.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as fault:
        reason = fault.strerror if isinstance(fault, OSError) else "it is not UTF-8 text"
        raise KeyFileError(f"expected a file of API keys at {path}: {reason}") from None
    found: list[tuple[str, str, int]] = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        where = f"{path}, line {number}"
        if len(words) != 2:
            raise KeyFileError(f"{where}: expected a key and an owner, got {len(words)} {'words' if len(words) > 1 else 'word'}")
        key, owner = words
        if _KEY.fullmatch(key) is None:
            raise KeyFileError(f"{where}: expected a key of {_KEY_IS}")
        found.append((key, owner, number))
    if not found:
        raise KeyFileError(f"expected at least one key in {path}, got none")
    return found


def header_values(scope: Scope, name: bytes) -> list[str]:
    # Lower-cased here: not every WebSocket server class does, whatever ASGI says.
    return [value.decode("latin-1") for key, value in scope["headers"] if key.lower() == name]


def _offered_keys(scope: Scope) -> list[str]:
    bearers = [value.partition(" ") for value in header_values(scope, b"authorization")]
    keys = [token.strip() for scheme, _, token in bearers if scheme.lower() == "bearer"]
    keys += header_values(scope, b"api-key")
    keys += [name.removeprefix(KEY_SUBPROTOCOL) for name in scope.get("subprotocols", ()) if name.startswith(KEY_SUBPROTOCOL)]
    return [key for key in keys if key]


def _digest(key: str) -> bytes:
    """Of equal length for every key, so that comparing takes equally long."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
