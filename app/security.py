"""Who may speak to this server: which hosts and pages, and with which keys.

Owns the checks of Host, Origin and API key, made before routing on every path, and the security headers of every response. Any page
the person visits can reach a server on loopback, so that a foreign Origin, or a Host that is not this server's (DNS rebinding), is
refused whatever it asks for. Knows no route but those that need no key, and decides by the scope's path alone: nothing here or later
is looked up by Host.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from typing import TypeVar

import msgspec
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from app.ephemeral import EphemeralKey
from app.keys import KeyRefusedError, Keys, header_values
from app.refusal import Refusal
from app.request_ids import request_id_of

NOT_AUTHENTICATED = 4401  # close code; official clients do not reconnect on it
SUBPROTOCOLS = ("hocket", "realtime")  # the ones we speak
PUBLIC_PATHS = frozenset({"/", "/healthz", "/readyz"})
PUBLIC_FOLDERS = ("/static/", "/c/")  # the page's files, and the page under a conversation's address

SECURITY_HEADERS = {
    b"content-security-policy": b"default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'self'; "
    b"frame-ancestors 'none'",
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-opener-policy": b"same-origin",
}

_DEFAULT_PORTS = {"http": 80, "https": 443}
_WEB_SCHEMES = {"http": "http", "https": "https", "ws": "http", "wss": "https"}  # of a scope -> of a page of the same origin
_AUTHORITY = re.compile(r"(?P<name>[a-z0-9_](?:[a-z0-9._-]*[a-z0-9_])?|\[[0-9a-f:.]{2,45}\])(?::(?P<port>[0-9]{1,5}))?", re.ASCII)
_ORIGIN = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<authority>[^/?#@]+)", re.ASCII)

T = TypeVar("T")
Authority = tuple[str, int | None]  # name or address (IPv6 without brackets, shortest form), port if one is given
Origin = tuple[str, str, int | None]  # scheme, name or address, port (the scheme's own if none is given)


def parse_authority(text: str) -> Authority | None:
    """`name`, `name:port`, `1.2.3.4:port` or `[::1]:port`, as in a Host header; None for anything else (user, path, query...)."""
    found = _AUTHORITY.fullmatch(text.lower())
    if found is None:
        return None
    name, port = found["name"], found["port"]
    if name.startswith("["):
        try:
            name = ipaddress.IPv6Address(name[1:-1]).compressed
        except ValueError:
            return None
    if port is None:
        return name, None
    return (name, int(port)) if int(port) < 65536 else None


def parse_origin(text: str) -> Origin | None:
    """`scheme://host[:port]`, as in an Origin header; None for anything else, `null` included."""
    found = _ORIGIN.fullmatch(text.lower())
    authority = parse_authority(found["authority"]) if found else None
    if found is None or authority is None:
        return None
    name, port = authority
    return found["scheme"], name, _DEFAULT_PORTS.get(found["scheme"]) if port is None else port


def is_loopback(host: str) -> bool:
    """Whether a server bound to `host` is reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def own_hosts(bound: str) -> list[str]:
    """The Host headers that mean a server bound to `bound`, with any port: loopback's names too, where they lead to it."""
    loopback = ["localhost", "127.0.0.1", "[::1]"] if is_loopback(bound) or bound in ("0.0.0.0", "::") else []
    return [f"[{bound}]" if ":" in bound else bound, *loopback]


def chosen_subprotocol(scope: Scope) -> str | None:
    """The subprotocol to accept a WebSocket with: one that we speak, if it is offered; never the one that holds a key."""
    return next((name for name in SUBPROTOCOLS if name in scope.get("subprotocols", ())), None)


async def accept(socket: WebSocket) -> None:
    await socket.accept(chosen_subprotocol(socket.scope))


def owner_of(scope: Scope) -> str:
    """Whose request it is, as `Guard` found."""
    owner: str = scope["state"]["owner"]
    return owner


def ephemeral_key_of(scope: Scope) -> EphemeralKey | None:
    """The ephemeral key that a WebSocket was opened with, if it was."""
    key: EphemeralKey | None = scope["state"]["ephemeral"]
    return key


class Guard:
    """ASGI middleware, outermost: lets through what comes from an allowed host and page with a valid key.

    On every path that needs a key `owner_of(scope)` and `ephemeral_key_of(scope)` are known from then on. Pages of an allowed foreign
    origin get CORS headers.
    """

    def __init__(self, app: ASGIApp, hosts: Iterable[str], origins: Iterable[str], keys: Keys) -> None:
        """hosts: `name` (any port) or `name:port`; origins: `scheme://name[:port]`. Raises: ValueError for others."""
        origins = list(origins)
        self._app = app
        self._hosts = {_required(parse_authority(host), "a host", host) for host in hosts}
        self._origins = {_required(parse_origin(origin), "an origin", origin) for origin in origins}
        self._keys = keys
        self._entrance: ASGIApp = self._check_key
        if origins:
            self._entrance = CORSMiddleware(
                self._check_key,
                allow_origins=[_spelled(*origin) for origin in self._origins],
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=["x-request-id"],
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        send = _with_security_headers(send) if scope["type"] == "http" else _with_reasons(scope, receive, send)
        refusal = self._foreign(scope)
        if refusal is not None:
            await _refuse(refusal, scope, receive, send)
        else:
            await self._entrance(scope, receive, send)

    def _foreign(self, scope: Scope) -> Refusal | None:
        """Why the request's Host or Origin is refused, if it is."""
        hosts = header_values(scope, b"host")
        if len(hosts) != 1:
            return Refusal(400, f"expected one Host header, got {len(hosts)}", "invalid_host")
        host = parse_authority(hosts[0])
        if host is None:
            return Refusal(400, "expected a Host header of the form name:port", "invalid_host")
        scheme = _WEB_SCHEMES[scope["scheme"]]
        name, port = host
        port = _DEFAULT_PORTS[scheme] if port is None else port
        if (name, None) not in self._hosts and (name, port) not in self._hosts:
            return Refusal(403, f"the host {hosts[0]} is not this server's: --allowed-hosts adds names", "host_not_allowed")

        origins = header_values(scope, b"origin")
        if not origins:
            return None
        origin = parse_origin(origins[0]) if len(origins) == 1 else None
        if origin is None or (origin != (scheme, name, port) and origin not in self._origins):
            return Refusal(403, "requests from pages of other origins are refused: --allowed-origins adds some", "origin_not_allowed")
        return None

    async def _check_key(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket" or not _is_public(scope["path"]):
            try:
                caller = self._keys.caller(scope)
            except KeyRefusedError as fault:
                refusal = Refusal(401, str(fault), "invalid_api_key")
                if scope["type"] == "websocket" and header_values(scope, b"origin"):
                    await _tell_page(refusal, scope, receive, send)
                else:
                    await _refuse(refusal, scope, receive, send)
                return
            scope.setdefault("state", {}).update(owner=caller.owner, ephemeral=caller.ephemeral)
        await self._app(scope, receive, send)


async def _refuse(refusal: Refusal, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with an HTTP error, which a WebSocket's client gets instead of the upgrade."""
    if scope["type"] == "websocket":
        await receive()  # websocket.connect
        if "websocket.http.response" not in scope.get("extensions", {}):
            await send({"type": "websocket.close", "code": 1008})  # the server makes an HTTP 403 of it
            return
    # A client whose WebSocket is refused may be shown the body and no header.
    response = refusal.response(request_id_of(scope) if scope["type"] == "websocket" else None)
    if refusal.status == 401:
        response.headers["www-authenticate"] = "Bearer"
    await response(scope, receive, send)


async def _tell_page(refusal: Refusal, scope: Scope, receive: Receive, send: Send) -> None:
    """A page cannot see the status of a refused upgrade: accept, say it in an `error` frame, and close for good."""
    await receive()  # websocket.connect
    await send({"type": "websocket.accept", "subprotocol": chosen_subprotocol(scope)})
    await send({"type": "websocket.send", "text": msgspec.json.encode(refusal.event).decode()})
    await send({"type": "websocket.close", "code": NOT_AUTHENTICATED, "reason": "not authenticated"})


def _with_security_headers(send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", ()))
            present = {name.lower() for name, _ in headers}
            headers += [(name, value) for name, value in SECURITY_HEADERS.items() if name not in present]
            message = {**message, "headers": headers}
        await send(message)

    return send_with_headers


def _with_reasons(scope: Scope, receive: Receive, send: Send) -> Send:
    """Routing closes an upgrade that no route takes: answer it with a reason instead of the server's bare 403."""
    accepted = "websocket.http.response" not in scope.get("extensions", {})

    async def send_with_reason(message: Message) -> None:
        nonlocal accepted
        if message["type"] == "websocket.close" and not accepted:
            refusal = Refusal(404, f"{scope['path']} does not exist, or takes no WebSocket", "not_found")
            await refusal.response(request_id_of(scope))(scope, receive, send)
        else:
            accepted = True
            await send(message)

    return send_with_reason


def _is_public(path: str) -> bool:
    return path in PUBLIC_PATHS or path.startswith(PUBLIC_FOLDERS)


def _required(parsed: T | None, kind: str, text: str) -> T:
    if parsed is None:
        raise ValueError(f"expected {kind}, got {text!r}")
    return parsed


def _spelled(scheme: str, host: str, port: int | None) -> str:
    """As browsers write an origin: without the scheme's own port."""
    name = f"[{host}]" if ":" in host else host
    return f"{scheme}://{name}" if port in (None, _DEFAULT_PORTS.get(scheme)) else f"{scheme}://{name}:{port}"
