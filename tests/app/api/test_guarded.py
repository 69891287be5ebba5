"""Who is let in, on the real server and every path of it. (slow)"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Origin, Subprotocol

from tests.app.wire import Wire
from tests.serving import Server, StartFailed

pytestmark = pytest.mark.slow

PATHS = [
    ("GET", "/"),
    ("GET", "/c/conv_x"),
    ("GET", "/static/js/main.js"),
    ("GET", "/healthz"),
    ("GET", "/readyz"),
    ("GET", "/v1/models"),
    ("GET", "/v1/responses/resp_x"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/realtime/client_secrets"),
    ("GET", "/v1/conversations"),
    ("POST", "/v1/conversations"),
    ("GET", "/nowhere"),
]


@pytest.mark.parametrize("path", PATHS)
def test_foreign_pages_and_unknown_hosts_are_refused_everywhere(server: Server, path: tuple[str, str]) -> None:
    """S1, S2, DNS rebinding."""
    port = server.port
    for headers in (
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": f"http://127.0.0.1.evil.example:{port}"},
        {"Origin": f"https://127.0.0.1:{port}"},
        {"Host": "evil.example"},
        {"Host": f"evil.example:{port}"},
        {"Host": "a/?x="},
        {"Host": f"127.0.0.1:{port}/healthz?"},
    ):
        assert httpx.request(*_at(server, path), headers=headers).status_code in (400, 403), headers
    assert httpx.request(*_at(server, path), headers={"Origin": server.url}).status_code != 403


def _at(server: Server, path: tuple[str, str]) -> tuple[str, str]:
    return path[0], f"{server.url}{path[1]}"


def test_sockets_too(server: Server) -> None:
    for headers in ({"Origin": "https://evil.example"}, {"Origin": "null"}):
        with pytest.raises(InvalidStatus) as refused:
            Wire(server.url, additional_headers=headers)
        assert refused.value.response.status_code == 403
    with Wire(server.url, additional_headers={"Origin": server.url}) as wire:
        assert wire.respond(input="Hi", max_output_tokens=1)


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Any:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("# key owner\nkey-of-ana ana\nkey-of-ben ben\n")
    running = Server(keys.parent / "data", "--api-key", str(keys), "--api-key", "key-of-nobody-else", "--log-level", "debug").start()
    yield running
    running.stop()
    assert "/v1/responses" in running.log and "key-of-" not in running.log, "no key is ever logged, nor what was offered for one"


def test_without_a_key_nothing_but_the_page_and_health(locked: Server) -> None:
    for method, path in PATHS:
        public = not path.startswith("/v1/") and path != "/nowhere"
        for headers in ({}, {"Authorization": "Bearer key-of-cyd"}, {"api-key": "key-of-cyd"}):
            status = httpx.request(method, f"{locked.url}{path}", headers=headers).status_code
            assert (status == 401) is not public, path
    for headers in ({"Authorization": "Bearer key-of-ana"}, {"api-key": "key-of-ana"}, {"api-key": "key-of-nobody-else"}):
        assert httpx.get(f"{locked.url}/v1/models", headers=headers).status_code == 200


def test_sockets_say_who_they_are(locked: Server) -> None:
    with pytest.raises(InvalidStatus) as refused:
        Wire(locked.url)
    assert refused.value.response.status_code == 401
    with Wire(locked.url, additional_headers={"Origin": locked.url}) as page:
        assert page.receive()["error"]["code"] == "invalid_api_key"
        with pytest.raises(ConnectionClosed) as closed:
            page.receive()
        assert closed.value.rcvd
        assert closed.value.rcvd.code == 4401
    with Wire(locked.url, subprotocols=["hocket", "openai-insecure-api-key.key-of-ana"]) as wire:
        assert wire.connection.subprotocol == "hocket"
        assert wire.respond(input="Hi", max_output_tokens=1)[-1]["type"] == "response.incomplete"


def test_an_ephemeral_key_is_for_its_owners_realtime_socket_alone(locked: Server) -> None:
    """A page gets one from its own server, and can do nothing else with it."""
    ana, ben = ({"Authorization": f"Bearer key-of-{name}"} for name in ("ana", "ben"))
    made = httpx.post(f"{locked.url}/v1/realtime/client_secrets", json={"session": {"instructions": "Be brief."}}, headers=ana).json()
    key = made["value"]
    url = locked.url.replace("http", "ws")
    with connect(
        f"{url}/v1/realtime",
        subprotocols=[Subprotocol("realtime"), Subprotocol(f"openai-insecure-api-key.{key}")],
        origin=Origin(locked.url),
    ) as socket:
        assert socket.subprotocol == "realtime"
        session = json.loads(socket.recv(60))["session"]
        assert session["instructions"] == "Be brief."
        item = {"id": "item_hers", "type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}
        socket.send(json.dumps({"type": "conversation.item.create", "item": item}))
        assert json.loads(socket.recv(60))["type"] == "conversation.item.added"
    offered = {"Authorization": f"Bearer {key}"}
    with pytest.raises(InvalidStatus) as refused:
        Wire(locked.url, additional_headers=offered)
    assert refused.value.response.status_code == 401
    for method, path in (("GET", "/v1/models"), ("GET", "/v1/realtime"), ("POST", "/v1/realtime/client_secrets")):
        assert httpx.request(method, f"{locked.url}{path}", headers=offered).status_code == 401, path
    with pytest.raises(InvalidStatus) as refused:
        connect(f"{url}/v1/realtime", additional_headers={"Authorization": f"Bearer {key[:-1]}"})
    assert refused.value.response.status_code == 401
    assert httpx.get(f"{locked.url}/v1/conversations", headers=ben).json()["data"] == []
    assert key not in locked.log


def test_owners_see_nothing_of_each_other(locked: Server) -> None:
    """C9, E3: over every protocol, the same answer as for what never was."""
    ana, ben = ({"Authorization": f"Bearer key-of-{name}"} for name in ("ana", "ben"))
    prompt = "A prompt that is long enough to fill a block of the cache, and then some more of it."
    with Wire(locked.url, additional_headers=ana) as hers, Wire(locked.url, additional_headers=ben) as his:
        conversation = httpx.post(f"{locked.url}/v1/conversations", json={}, headers=ana).json()["id"]
        made = hers.respond(conversation=conversation, input=prompt, max_output_tokens=2)[-1]["response"]
        again = hers.respond(input=prompt, max_output_tokens=2)[-1]["response"]
        assert again["usage"]["input_tokens_details"]["cached_tokens"] > 0
        assert his.respond(input=prompt, max_output_tokens=2)[-1]["response"]["usage"]["input_tokens_details"]["cached_tokens"] == 0

        def answers(response: str, conversation: str) -> list[Any]:
            got: list[Any] = [
                his.respond(input="x", previous_response_id=response)[-1],
                his.respond(input="x", conversation=conversation)[-1],
            ]
            his.send({"type": "response.cancel", "response_id": response})
            got.append(his.receive())
            for method, path in (
                ("GET", f"/v1/responses/{response}"),
                ("GET", f"/v1/responses/{response}?stream=true&starting_after=1"),
                ("POST", f"/v1/responses/{response}/cancel"),
                ("GET", f"/v1/conversations/{conversation}"),
                ("GET", f"/v1/conversations/{conversation}/items"),
                ("GET", f"/v1/conversations?after={conversation}"),
                ("DELETE", f"/v1/conversations/{conversation}"),
            ):
                answer = httpx.request(method, f"{locked.url}{path}", headers=ben)
                got.append((answer.status_code, answer.json()))
            return [str(one).replace(response, "RESPONSE").replace(conversation, "CONVERSATION") for one in got]

        real = answers(made["id"], conversation)
        assert real == answers("resp_" + "0" * 32, "conv_" + "0" * 32)
        assert "'status': 400" in real[0], "what a request refers to is a field of it"
        assert all("404" in one for one in real[1:])
        for other in (ben, {"Authorization": "Bearer key-of-nobody-else"}):
            assert httpx.get(f"{locked.url}/v1/conversations", headers=other).json()["data"] == []
        hers.create(input="Long.", ignore_eos=True, max_output_tokens=30)
        running = hers.receive()["response"]["id"]
        his.send({"type": "response.cancel", "response_id": running})
        assert his.receive()["status"] == 404
        assert hers.rest()[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


def test_an_open_address_without_keys_is_refused(new_server: Callable[..., Server]) -> None:
    with pytest.raises(StartFailed, match="api_key"):
        new_server("--host", "0.0.0.0").start()
