"""API keys as they are given, and the ones that live for minutes."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import pytest

from app.ephemeral import EphemeralKeys
from app.keys import KEY_SUBPROTOCOL, KeyFileError, gather_keys
from tests.app.test_security import KEYS, ask, guarded, refused


def test_key_files(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# who\n\n  abc-1   ana\nabc-2\tana\n #x y\nabc.3 ben\n", encoding="utf-8-sig")
    assert gather_keys([str(path)]) == {"abc-1": "ana", "abc-2": "ana", "abc.3": "ben"}
    for text, expected in (
        ("k1 ana\nSECRET", "line 2: expected a key and an owner, got 1 word"),
        ("SECRET ana ben", "line 1: expected a key and an owner, got 3 words"),
        ("SECRET ana\n#\nSECRET ben", f"line 3: the key of {path}, line 1 again"),
        ("SECRET/= ana", "line 1: expected a key of letters, digits"),
        ("SECRÉT ana", "line 1: expected a key of letters, digits"),
        ("# none\n", "at least one key"),
    ):
        path.write_text(text)
        with pytest.raises(KeyFileError, match=expected) as caught:
            gather_keys([str(path)])
        assert "SECR" not in str(caught.value) and str(path) in str(caught.value)
    path.write_bytes(b"\xff\xfe ana")
    with pytest.raises(KeyFileError, match="not UTF-8"):
        gather_keys([str(path)])
    with pytest.raises(KeyFileError, match="No such file"):
        gather_keys([str(tmp_path / "none")])


def test_a_key_and_a_file_of_keys_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "keys").write_text("abc-1 ana\n")
    assert gather_keys(["keys"]) == gather_keys(["./keys"]) == gather_keys([str(tmp_path / "keys")]) == {"abc-1": "ana"}
    key = "0123456789.abc-9"
    digest = hashlib.sha256(key.encode()).hexdigest()
    assert gather_keys([key, "keys"]) == {key: f"key-{digest[:12]}", "abc-1": "ana"}, "the owner says nothing of the key"
    long = "x" * 5000
    assert list(gather_keys([long])) == [long], "longer than a file's name can be"
    for missing in ("./keyz", "sub/keys", "~/no-such-file-of-keys"):
        with pytest.raises(KeyFileError, match="No such file"):
            gather_keys([missing])
    monkeypatch.setenv("HOME", str(tmp_path))
    assert gather_keys(["~/keys"]) == {"abc-1": "ana"}
    with pytest.raises(KeyFileError, match="Is a directory"):
        gather_keys([str(tmp_path)])


@pytest.mark.parametrize("mistyped", ["keyz", "keys.txt", "keys-of-production.conf", "k" * 15])
def test_the_name_of_a_file_that_is_not_there_is_no_key(mistyped: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server would be open to whoever guesses it, and to nobody else."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KeyFileError, match=r"key 1: expected a file that exists .*or a key of at least 16 characters") as refused:
        gather_keys([mistyped])
    assert mistyped not in str(refused.value)
    (tmp_path / mistyped).write_text("k ana\n")
    assert gather_keys([mistyped]) == {"k": "ana"}, "in a file a key may be as short as one likes"


def test_a_key_that_comes_again_is_told_by_its_place(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("SECRET-of-someone-1 ana\nSECRET-of-someone-2 ben\n")
    for sources, expected in (
        (["SECRET-of-someone-3", "k" * 16, "SECRET-of-someone-3"], "key 3: the key of key 1 again"),
        (["SECRET-of-someone-2", str(file)], f"{file}, line 2: the key of key 1 again"),
        ([str(file), "SECRET-of-someone-1"], f"key 2: the key of {file}, line 1 again"),
        (["k" * 16, "SECRET 4"], "key 2: expected the path of a file, or a key of letters, digits"),
    ):
        with pytest.raises(KeyFileError, match=re.escape(expected)) as caught:
            gather_keys(sources)
        assert "SECRET" not in str(caught.value)


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.25

    def __call__(self) -> float:
        return self.now


def test_an_ephemeral_key_is_known_until_it_expires() -> None:
    clock = Clock()
    keys = EphemeralKeys(clock=clock)
    key = keys.issue("ana", {"type": "realtime"}, 60)
    assert key.value.startswith("ek_") and len(key.value) > 40 and KEY_CHARACTERS.fullmatch(key.value)
    assert (key.owner, key.expires_at, key.session) == ("ana", 1_000_060, {"type": "realtime"})
    assert keys.issue("ana", {}, 60).value != key.value
    assert keys.find(key.value) is key
    assert keys.find(key.value[:-1]) is keys.find("") is keys.find("ek_\udcff") is None
    clock.now = 1_000_059.9
    assert keys.find(key.value) is key
    clock.now = 1_000_060
    assert keys.find(key.value) is None
    assert key.value not in repr(key) and "realtime" not in repr(key)


def test_ephemeral_keys_are_bounded_for_each_owner() -> None:
    clock = Clock()
    keys = EphemeralKeys(limit=3, clock=clock)
    of_ben = keys.issue("ben", {}, 60)
    brief = keys.issue("ana", {}, 5)
    first, second, third, fourth = (keys.issue("ana", {}, 60) for _ in range(4))
    found = [keys.find(key.value) for key in (brief, first, second, third, fourth, of_ben)]
    assert found == [None, None, second, third, fourth, of_ben], "her oldest go, and nobody else's"
    keys = EphemeralKeys(limit=3, clock=clock)
    brief, first, second = keys.issue("ana", {}, 5), keys.issue("ana", {}, 60), keys.issue("ana", {}, 60)
    clock.now += 5
    third = keys.issue("ana", {}, 60)
    assert [keys.find(key.value) for key in (brief, first, second, third)] == [None, first, second, third], "what is over takes no place"


KEY_CHARACTERS = re.compile(r"[A-Za-z0-9_]+")


@pytest.mark.parametrize("known", [KEYS, {}])
def test_an_ephemeral_key_opens_the_realtime_socket_and_nothing_else(known: dict[str, str]) -> None:
    ephemeral = EphemeralKeys()
    key = ephemeral.issue("ana" if known else "local", {"model": "m"}, 60)
    guard, app = guarded(known, ephemeral=ephemeral)
    ways: tuple[dict[str, Any], ...] = (
        {"authorization": f"Bearer {key.value}"},
        {"sec_websocket_protocol": f"realtime, {KEY_SUBPROTOCOL}{key.value}"},
    )
    for headers in ways:
        (accept,) = ask(guard, "/v1/realtime", "websocket", **headers).messages
        assert accept == {"type": "websocket.accept", "subprotocol": "realtime" if "sec_websocket_protocol" in headers else None}
        assert (app.owners.pop(), app.ephemeral.pop()) == (key.owner, key)
        for path, kind in (
            ("/v1/responses", "websocket"),
            ("/v1/realtime", "http"),
            ("/v1/realtime/", "websocket"),
            ("/v1/models", "http"),
        ):
            answer = ask(guard, path, kind, **headers)
            if known:
                assert refused(answer, kind, 401) and key.value not in str(answer.messages)
            else:
                assert (app.owners.pop(), app.ephemeral.pop()) == ("local", None)
        assert app.owners == []
    ask(guard, "/v1/realtime", "websocket", authorization="Bearer ana-key")
    assert (app.owners.pop(), app.ephemeral.pop()) == ("ana" if known else "local", None)


@pytest.mark.parametrize("known", [KEYS, {}])
def test_an_ephemeral_key_that_is_over_is_a_wrong_key(known: dict[str, str]) -> None:
    """Also where no keys are asked for: its page would be let in without the session that the key is for."""
    clock = Clock()
    ephemeral = EphemeralKeys(clock=clock)
    key = ephemeral.issue("ana", {}, 60)
    guard, app = guarded(known, ephemeral=ephemeral)
    clock.now += 60
    for value in (key.value, "ek_" + "0" * 48):
        answer = ask(guard, "/v1/realtime", "websocket", authorization=f"Bearer {value}")
        assert refused(answer, "websocket", 401) and value not in str(answer.messages)
        answer = ask(
            guard,
            "/v1/realtime",
            "websocket",
            origin="http://127.0.0.1:8000",
            sec_websocket_protocol=f"realtime, {KEY_SUBPROTOCOL}{value}",
        )
        assert answer.types == ["websocket.accept", "websocket.send", "websocket.close"] and value not in str(answer.messages)
    assert app.owners == []
