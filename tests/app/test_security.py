"""Foreign pages, foreign hosts and wrong keys are refused on every path (S1, S2, DNS rebinding), and nobody else is."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.ephemeral import EphemeralKeys
from app.keys import KEY_SUBPROTOCOL, KeyRefusedError, Keys
from app.security import (
    Guard,
    chosen_subprotocol,
    ephemeral_key_of,
    is_loopback,
    own_hosts,
    owner_of,
    parse_authority,
    parse_origin,
)

PATHS = ["/", "/static/js/main.js", "/healthz", "/readyz", "/v1/responses", "/v1/models", "/none"]
KEYS = {"ana-key": "ana", "ben-key": "ben"}


class Reached:
    """The app behind the guard: remembers who came, and with which ephemeral keys."""

    def __init__(self) -> None:
        self.owners: list[str | None] = []
        self.ephemeral: list[Any] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.owners.append(owner_of(scope) if "owner" in scope.get("state", {}) else None)
        self.ephemeral.append(ephemeral_key_of(scope) if "ephemeral" in scope.get("state", {}) else None)
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.accept", "subprotocol": chosen_subprotocol(scope)})
        else:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"referrer-policy", b"origin")]})
            await send({"type": "http.response.body", "body": b"ok"})


class Answer:
    def __init__(self, messages: list[dict[str, Any]]) -> None:
        self.messages = messages
        self.types = [message["type"] for message in messages]
        self.status: int = messages[0].get("status", 0)
        self.headers = {name.decode(): value.decode() for name, value in messages[0].get("headers", ())}

    @property
    def error(self) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(b"".join(message.get("body", b"") for message in self.messages))
        assert body.keys() == {"error"}, "request ids are another's"
        error: dict[str, Any] = body["error"]
        return error


def ask(guard: Guard, path: str = "/v1/models", kind: str = "http", scheme: str = "", extension: bool = True, **headers: Any) -> Answer:
    """One request; a header given as a list comes several times, as None not at all."""
    given = {"host": "127.0.0.1:8000"} | {name.replace("_", "-"): value for name, value in headers.items()}
    pairs = [
        (name.encode(), one.encode("latin-1"))
        for name, value in given.items()
        if value is not None
        for one in (value if isinstance(value, list) else [value])
    ]
    offered = [word.strip() for name, value in pairs if name == b"sec-websocket-protocol" for word in value.decode().split(",")]
    scope = {
        "type": kind,
        "scheme": scheme or ("http" if kind == "http" else "ws"),
        "method": given.get(":method", "GET"),
        "path": path,
        "headers": [pair for pair in pairs if pair[0] != b":method"],
        "subprotocols": offered,
        "extensions": {"websocket.http.response": {}} if extension else {},
        "state": {},
    }
    messages: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect" if kind == "websocket" else "http.request"}

    async def send(message: Any) -> None:
        messages.append(message)

    asyncio.run(guard(scope, receive, send))
    return Answer(messages)


def guarded(
    keys: dict[str, str] | None = None,
    hosts: tuple[str, ...] = (),
    origins: tuple[str, ...] = (),
    ephemeral: EphemeralKeys | None = None,
) -> tuple[Guard, Reached]:
    app = Reached()
    return Guard(app, [*own_hosts("127.0.0.1"), *hosts], origins, Keys(keys or {}, ephemeral)), app


def refused(answer: Answer, kind: str, status: int) -> bool:
    start = "http.response.start" if kind == "http" else "websocket.http.response.start"
    return answer.types[0] == start and answer.status == status and answer.error["message"] != ""


@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.parametrize("path", PATHS)
def test_foreign_pages_and_hosts_are_refused_on_every_path(path: str, kind: str) -> None:
    guard, app = guarded()
    for origin in (
        "http://evil.example",
        "null",
        "",
        "http://127.0.0.1:8001",
        "https://127.0.0.1:8000",
        "http://127.0.0.1:8000/",
        "file://",
    ):
        assert refused(ask(guard, path, kind, origin=origin), kind, 403), origin
    assert refused(ask(guard, path, kind, origin=["http://127.0.0.1:8000", "http://127.0.0.1:8000"]), kind, 403)
    for host in (
        "evil.example",
        "evil.example:8000",
        "127.0.0.1.evil.example:8000",
        "localhost.evil.example",
        "127.0.0.2",
        "10.0.0.1:8000",
    ):
        assert refused(ask(guard, path, kind, host=host), kind, 403), host
        assert refused(ask(guard, path, kind, host=host, origin=f"http://{host}"), kind, 403), (
            "DNS rebinding: the same origin does not help"
        )
    for host in (
        "a/?x=",
        "127.0.0.1:8000/",
        "127.0.0.1:8000/?x=",
        "ana@127.0.0.1",
        "127.0.0.1:8000#",
        "",
        ":8000",
        "[::1",
        "::1",
        "127.0.0.1:",
    ):
        assert refused(ask(guard, path, kind, host=host), kind, 400), host
    for host in ("127.0.0.1:99999", "127.0.0.1:8000 ", "127.0.0.1\n", "[::1%25eth0]", "127.0.0.1:８０", "127.0.0.1,evil.example"):
        assert refused(ask(guard, path, kind, host=host.encode().decode("latin-1")), kind, 400), host
    assert refused(ask(guard, path, kind, host=None), kind, 400)
    assert refused(ask(guard, path, kind, host=["127.0.0.1:8000", "evil.example"]), kind, 400)
    assert refused(ask(guard, path, kind, host=["127.0.0.1:8000", "127.0.0.1:8000"]), kind, 400)
    assert app.owners == []


@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_own_pages_and_programs_come_through(kind: str) -> None:
    guard, app = guarded(hosts=("chat.example", "lan:9"), origins=("https://page.example", "http://other:3000"))
    for host in (
        "127.0.0.1:8000",
        "127.0.0.1",
        "localhost:1",
        "LOCALHOST:8000",
        "[::1]:8000",
        "[0:0::1]",
        "chat.example",
        "chat.example:7",
        "lan:9",
    ):
        ask(guard, kind=kind, host=host)
        ask(guard, kind=kind, host=host, origin=f"http://{host}")
    assert len(app.owners) == 18
    for origin in ("https://page.example", "https://page.example:443", "HTTP://other:3000"):
        ask(guard, kind=kind, origin=origin)
    ask(guard, kind=kind, scheme="https" if kind == "http" else "wss", host="chat.example", origin="https://chat.example")
    ask(guard, kind=kind, host="127.0.0.1", origin="http://127.0.0.1:80")
    assert app.owners == ["local"] * 23
    for origin in ("https://page.example:444", "http://page.example", "http://other", "https://a.page.example"):
        assert refused(ask(guard, kind=kind, origin=origin), kind, 403)
    for host in ("lan", "lan:8", "a.chat.example"):
        assert refused(ask(guard, kind=kind, host=host), kind, 403)


def test_servers_that_do_not_lower_header_names_change_nothing() -> None:
    guard, app = guarded()
    assert refused(ask(guard, host=None, HOST="127.0.0.1:8000", Origin="http://evil.example"), "http", 403)
    assert app.owners == []


def test_a_socket_is_refused_without_the_extension_too() -> None:
    guard, app = guarded()
    assert ask(guard, kind="websocket", extension=False, origin="null").types == ["websocket.close"]
    assert app.owners == []


def test_other_scopes_pass() -> None:
    guard, app = guarded()

    async def unused(*_: Any) -> Any:
        raise AssertionError

    with pytest.raises(AssertionError):
        asyncio.run(guard({"type": "lifespan"}, unused, unused))
    assert app.owners == [None]


hostname_characters = st.text(alphabet=st.characters(max_codepoint=255), max_size=30)


@given(hostname_characters)
def test_no_other_host_gets_through(host: str) -> None:
    guard, app = guarded()
    answer = ask(guard, host=host)
    name = parse_authority(host)
    if name is not None and name[0] in ("localhost", "127.0.0.1", "::1"):
        assert answer.status == 200
    else:
        assert answer.status in (400, 403) and app.owners == []


@given(st.one_of(hostname_characters, hostname_characters.map(lambda text: f"http://127.0.0.1:8000{text}")))
def test_no_other_origin_gets_through(origin: str) -> None:
    guard, app = guarded()
    answer = ask(guard, origin=origin)
    if origin.lower() == "http://127.0.0.1:8000":
        assert answer.status == 200
    else:
        assert answer.status == 403 and app.owners == []


@given(st.text(max_size=40))
def test_what_is_parsed_is_only_a_name_and_a_port(text: str) -> None:
    found = parse_authority(text)
    if found is not None:
        name, port = found
        assert not set(name) & set("/?#@[]\\ \t\r\n%") and name.isascii() and name == name.lower()
        assert port is None or 0 <= port < 65536
    origin = parse_origin(f"http://{text}")
    assert (origin is None) == (found is None)


def test_who_is_who_with_keys() -> None:
    guard, app = guarded(KEYS)
    for headers in (
        {"authorization": "Bearer ana-key"},
        {"authorization": "bearer  ana-key"},
        {"api_key": "ana-key"},
        {"authorization": "Bearer wrong", "api_key": "ana-key"},
        {"sec_websocket_protocol": f"realtime, {KEY_SUBPROTOCOL}ana-key"},
    ):
        for kind in ("http", "websocket"):
            ask(guard, kind=kind, **headers)
            assert app.owners.pop() == "ana", headers
    ask(guard, authorization="Bearer ben-key")
    assert app.owners == ["ben"]


@pytest.mark.parametrize("path", ["/v1/models", "/none", "/static", "/static2", "//", "/healthz/", "/static/../v1/models/../../v1"])
def test_programs_without_a_right_key_get_401(path: str) -> None:
    guard, app = guarded(KEYS)
    for headers in (
        {},
        {"authorization": "Bearer ana-ke"},
        {"authorization": "Basic ana-key"},
        {"authorization": "Bearer "},
        {"api_key": "ANA-KEY"},
    ):
        for kind in ("http", "websocket"):
            if path.startswith("/static/") and kind == "http":
                continue
            answer = ask(guard, path, kind, **headers)
            assert refused(answer, kind, 401), headers
            error = answer.error
            assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_api_key", None)
            assert "ana-k" not in error["message"].lower()
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.headers["content-type"] == "application/json"
    assert app.owners == []


def test_the_page_needs_no_key_but_its_socket_does() -> None:
    guard, app = guarded(KEYS)
    for path in ("/", "/static/js/main.js", "/c/conv_1", "/healthz", "/readyz"):
        assert ask(guard, path).status == 200
        assert refused(ask(guard, path, "websocket"), "websocket", 401), "only files are public"
    assert app.owners == [None] * 5


def test_a_page_without_a_right_key_is_told_and_closed_for_good() -> None:
    """C10: it cannot see the 401 of a refused upgrade."""
    guard, app = guarded(KEYS)
    answer = ask(guard, kind="websocket", origin="http://127.0.0.1:8000", sec_websocket_protocol=f"{KEY_SUBPROTOCOL}nope, hocket")
    assert answer.types == ["websocket.accept", "websocket.send", "websocket.close"]
    accept, frame, close = answer.messages
    assert accept["subprotocol"] == "hocket"
    said = json.loads(frame["text"])
    assert (said["type"], said["status"], said["error"]["code"]) == ("error", 401, "invalid_api_key")
    assert close["code"] == 4401
    assert "nope" not in frame["text"]
    assert app.owners == []


def test_a_foreign_page_is_refused_before_its_key_is_looked_at() -> None:
    guard, app = guarded(KEYS)
    assert refused(ask(guard, origin="http://evil.example", authorization="Bearer ana-key"), "http", 403)
    assert app.owners == []


def test_the_key_is_never_echoed_as_subprotocol() -> None:
    guard, app = guarded(KEYS)
    for offered, chosen in (("", None), ("hocket, ", "hocket"), ("realtime, ", "realtime"), ("chat, ", None)):
        answer = ask(guard, kind="websocket", sec_websocket_protocol=f"{offered}{KEY_SUBPROTOCOL}ana-key")
        assert answer.messages == [{"type": "websocket.accept", "subprotocol": chosen}]
    assert app.owners == ["ana"] * 4


def carrying(name: str, value: str) -> dict[str, Any]:
    return {"type": "http", "path": "/v1/models", "headers": [(name.encode(), value.encode("latin-1"))]}


def test_without_keys_everyone_is_the_local_owner() -> None:
    assert Keys({}).caller(carrying("authorization", "Bearer anything")).owner == "local"


def test_all_keys_are_compared_whatever_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    import app.keys

    compared = 0
    genuine = app.keys.hmac.compare_digest

    def counted(one: bytes, other: bytes) -> bool:
        nonlocal compared
        compared += 1
        return genuine(one, other)

    monkeypatch.setattr(app.keys.hmac, "compare_digest", counted)
    keys = Keys({f"key-{n}": f"owner-{n}" for n in range(5)})
    assert keys.caller(carrying("api-key", "key-0")).owner == "owner-0"
    assert compared == 5
    with pytest.raises(KeyRefusedError):
        keys.caller(carrying("api-key", "kéy"))
    assert compared == 10


def test_security_headers_unless_the_app_says_otherwise() -> None:
    guard, _ = guarded(KEYS)
    headers = ask(guard, "/").headers
    assert "default-src 'self'" in headers["content-security-policy"] and "frame-ancestors 'none'" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "origin"
    assert ask(guard, "/v1/models").headers["x-content-type-options"] == "nosniff", "refusals too"


def test_an_allowed_foreign_page_may_use_fetch() -> None:
    guard, app = guarded(KEYS, origins=("https://page.example:443",))
    preflight = {":method": "OPTIONS", "access_control_request_method": "POST", "access_control_request_headers": "authorization"}
    answer = ask(guard, origin="https://page.example", **preflight)
    assert answer.status == 200 and answer.headers["access-control-allow-origin"] == "https://page.example"
    assert app.owners == []
    answer = ask(guard, origin="https://page.example", authorization="Bearer ana-key")
    assert answer.status == 200 and answer.headers["access-control-allow-origin"] == "https://page.example"
    assert answer.headers["access-control-expose-headers"] == "x-request-id"
    answer = ask(guard, origin="https://page.example")
    assert answer.status == 401 and answer.headers["access-control-allow-origin"] == "https://page.example", "it can read why"
    assert ask(guard, origin="https://evil.example", **preflight).status == 403


def test_unusable_names_are_refused_at_start() -> None:
    for hosts, origins in ((["a/b"], []), ([], ["null"]), ([], ["page.example"])):
        with pytest.raises(ValueError, match=r"expected (a host|an origin), got"):
            Guard(Reached(), hosts, origins, Keys({}))


def test_bound_addresses() -> None:
    assert own_hosts("::1")[0] == "[::1]"
    assert "localhost" in own_hosts("0.0.0.0") and "localhost" in own_hosts("::") and "localhost" not in own_hosts("10.0.0.1")
    assert all(map(is_loopback, ("127.0.0.1", "127.8.8.8", "::1", "localhost", "LocalHost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "localhost.example", "example", "")))


def test_an_upgrade_that_no_route_takes_is_told_so() -> None:
    async def unrouted(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "websocket.close", "code": 1000})

    guard = Guard(unrouted, own_hosts("127.0.0.1"), [], Keys({}))
    answer = ask(guard, "/v1/nowhere", "websocket")
    assert refused(answer, "websocket", 404) and answer.error["code"] == "not_found" and "/v1/nowhere" in answer.error["message"]
    assert ask(guard, "/v1/nowhere", "websocket", extension=False).types == ["websocket.close"]
