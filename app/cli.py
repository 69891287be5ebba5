"""The command `hocket`: serve, model, warmup, bench.

Owns the process: its arguments, log, listening socket, exit code and the line that says it is ready. Imports a command's parts only when
that command runs, so that `--help` is quick and nothing here loads torch.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib.metadata
import logging
import runpy
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from app.settings import Settings, SettingsError, load
from app.store import StoreError

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import ASGIApp

    from engine.core import ModelConfig

USAGE = """usage: hocket COMMAND [flags]

  hocket serve    run the server
  hocket model    fetch and convert the model, and say what it is
  hocket warmup   have all that serve makes once ready in the cache, compiled kernels included
  hocket bench    measure a server's speed (from a checkout)
  hocket --version

hocket COMMAND --help lists a command's flags.
"""

ENDING_SECONDS = 5  # for replies to end, with their end in the log, when the server is asked to stop
GRACE_SECONDS = 10  # for open requests after that
PING_SECONDS = 20.0
BACKLOG = 2048

# What uvicorn says of a client's doing, as of an error here, though the client was told: any page could fill the log.
_NOT_OURS = (
    "ASGI callable returned without completing handshake.",  # of an upgrade that is refused with an HTTP answer, which ends the handshake
    "Invalid UTF-8 sequence received from client.",  # with a traceback
)

FAILED, MISUSED, INTERRUPTED = 1, 2, 130  # exit codes


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        match words:
            case ["serve", *flags]:
                return serve(load(flags, "hocket serve"))
            case ["model", *flags]:
                return model(load(flags, "hocket model"))
            case ["warmup", *flags]:
                return warmup(load(flags, "hocket warmup"))
            case ["bench", *rest]:
                return bench(rest)
            case ["--version" | "-V"]:
                sys.stdout.write(f"hocket {_version()}\n")
                return 0
            case ["--help" | "-h" | "help"]:
                sys.stdout.write(USAGE)
                return 0
    except SettingsError as fault:
        _complain(f"hocket {words[0]}: {fault}\nusage: hocket {words[0]} [flags]; hocket {words[0]} --help lists them")
        return MISUSED
    except KeyboardInterrupt:
        return INTERRUPTED
    _complain(f"hocket: expected a command, got {words[0]!r}\n{USAGE}" if words else USAGE)
    return MISUSED


def serve(settings: Settings) -> int:
    """Run the server until it is told to stop."""
    _log_to_stderr(settings.log_level)
    try:
        listeners = listen(settings.host, settings.port)
    except OSError as fault:
        _complain(f"hocket serve: cannot listen on {_authority(settings.host, settings.port)}: {fault.strerror}")
        return FAILED
    try:
        from app.server import create_app

        shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
        scheme = "https" if settings.tls_cert else "http"
        url = f"{scheme}://{_authority(shown, listeners[0].getsockname()[1])}"
        _server(_plain_faults(create_app(settings)), settings, url).run(sockets=listeners)
    except SystemExit:  # uvicorn's way to say that the start failed; the reason is in the log
        return FAILED
    finally:
        for listener in listeners:
            listener.close()
    return 0


def model(settings: Settings) -> int:
    """Have the model ready in the cache, and print what it is."""
    from engine.core import EngineError
    from engine.weights.convert import prepare

    meter = _Meter()
    try:
        checkpoint = prepare(settings.model, settings.cache_dir, meter.show)
    except EngineError as fault:
        meter.end()
        _complain(f"hocket model: {fault}")
        return FAILED
    meter.end()
    sys.stdout.write(
        f"name        {checkpoint.name}\n"
        f"path        {checkpoint.path}\n"
        f"parameters  {_parameters(checkpoint.config):,}\n"
        f"context     {checkpoint.config.context_length:,} tokens\n"
    )
    return 0


def warmup(settings: Settings) -> int:
    """Have model and kernels ready in the cache, so that a server with the same flags makes nothing when it starts."""
    from app.server import engine_options
    from engine.core import EngineError
    from engine.decoder import load_decoder
    from engine.weights.convert import prepare

    options, meter = engine_options(settings), _Meter()
    try:
        checkpoint = prepare(options.model, options.cache_dir, meter.show)
        kernels = _compiled(options.cache_dir, meter.show) if options.kernels == "cpu" else "plain torch, with nothing to compile"
        load_decoder(checkpoint, options, 1, meter.show)  # packs the weights, and shows that this machine can run them
    except EngineError as fault:
        meter.end()
        _complain(f"hocket warmup: {fault}")
        return FAILED
    meter.end()
    sys.stdout.write(f"model    {checkpoint.name}, in {checkpoint.path.parent}\nkernels  {kernels}\n")
    return 0


def _compiled(cache_dir: Path, progress: Callable[[str, float | None], None]) -> str:
    """Have every kernel compiled, whichever this model and these settings need; say how many and where. Raises: EngineError"""
    from engine.kernels.cpu import attention, build, choose, kv, linear, rows  # noqa: F401  (they declare the stages)
    from engine.kernels.cpu.stage import STAGES

    build.prepare(cache_dir, STAGES, progress)
    return f"{len(STAGES)}, compiled for this CPU, in {build.folder(cache_dir)}"


def bench(arguments: Sequence[str]) -> int:
    """Run the package `benchmarks`, which is part of a checkout and not of an installation."""
    root = Path(__file__).resolve().parent.parent
    if not (root / "benchmarks" / "__main__.py").is_file():
        _complain(f"hocket bench: expected a checkout of the repository, got an installation without benchmarks ({root})")
        return FAILED
    sys.path.insert(0, str(root))
    sys.argv = ["hocket bench", *arguments]
    try:
        runpy.run_module("benchmarks", run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            _complain(end.code)
        return FAILED if isinstance(end.code, str) else end.code or 0
    return 0


def listen(host: str, port: int) -> list[socket.socket]:
    """Listening sockets on every address of `host`, all on one port (0: any free one).

    Listening starts before anything else does, so that a second server on the port ends before it touches data or model.

    Raises: OSError when the name is unknown or the port is taken.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    listeners: list[socket.socket] = []
    unavailable: OSError | None = None
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            listener = socket.socket(family, kind, protocol)
            try:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                listener.bind((address[0], port, *address[2:]))
                listener.listen(BACKLOG)
            except OSError as fault:
                listener.close()
                if fault.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                unavailable = fault  # a name may have an address of a family that this machine has not
                continue
            port = listener.getsockname()[1]
            listeners.append(listener)
        if not listeners and unavailable is not None:
            raise unavailable
    except OSError:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def _server(app: ASGIApp, settings: Settings, url: str) -> uvicorn.Server:
    import asyncio

    import uvicorn

    from app.websocket import WebSocketProtocol

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if settled := self.lifespan.state.get("settled"):
                self.settling = asyncio.create_task(_settle(settled))
            if self.started and not self.should_exit:
                sys.stdout.write(f"Hocket is ready: {url}\n")
                sys.stdout.flush()

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            """First end what runs: streams are then told their end, and not cut when GRACE_SECONDS are over."""
            if end_runs := self.lifespan.state.get("end_runs"):  # of `app/server.py`
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(end_runs(), ENDING_SECONDS)
            await super().shutdown(sockets)

    return Server(
        uvicorn.Config(
            app,
            loop="uvloop" if sys.platform != "win32" else "asyncio",
            ws=WebSocketProtocol,
            ws_max_size=settings.max_frame_bytes,
            ws_ping_interval=PING_SECONDS,
            ws_ping_timeout=PING_SECONDS,
            ws_per_message_deflate=False,  # more than doubles an idle connection's memory, and token frames are small
            lifespan="on",
            log_config=None,
            ssl_certfile=settings.tls_cert,
            ssl_keyfile=settings.tls_key,
            access_log=settings.log_level == "debug",
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
    )


def _plain_faults(app: ASGIApp) -> ASGIApp:
    """The same app, telling a start that failed for a reason people can mend in one line instead of a traceback."""
    from starlette.types import Message, Receive, Scope, Send

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await app(scope, receive, send)
            return
        failed: list[Message] = []

        async def hold_failure(message: Message) -> None:
            if message["type"] == "lifespan.startup.failed":
                failed.append(message)
            else:
                await send(message)

        try:
            await app(scope, receive, hold_failure)
        except Exception as fault:
            if failed and isinstance(fault, (StoreError, OSError)):
                failed[0] = {**failed[0], "message": str(fault)}
            raise
        finally:
            for message in failed:
                await send(message)

    return wrapped


def _log_to_stderr(level: str) -> None:
    from app.request_ids import NamesRequests

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s%(request)s: %(message)s"))
    handler.addFilter(NamesRequests())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.getLogger("uvicorn.error").addFilter(lambda record: record.msg not in _NOT_OURS)
    if level == "info":
        logging.getLogger("uvicorn").setLevel(logging.WARNING)  # at info it has a line for each connection
    if level == "debug":
        logging.getLogger("uvicorn.error").setLevel(logging.INFO)  # at debug it has every header, keys included, and every frame


class _Meter:
    """Shows progress on a terminal in one line that changes, elsewhere in a line for each stage."""

    def __init__(self) -> None:
        self._stage = ""
        self._terminal = sys.stderr.isatty()

    def show(self, stage: str, fraction: float | None) -> None:
        """fraction: of the stage that is done, from 0 to 1; None: nobody knows."""
        if self._terminal:
            percent = "" if fraction is None else f" {fraction:4.0%}"
            sys.stderr.write(f"\r\x1b[K{stage}{percent}")
        elif stage != self._stage:
            sys.stderr.write(f"{stage}\n")
        sys.stderr.flush()
        self._stage = stage

    def end(self) -> None:
        if self._terminal and self._stage:
            sys.stderr.write("\r\x1b[K")


def _parameters(config: ModelConfig) -> int:
    """How many weights a model of this shape has."""
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    attention = 2 * config.hidden_size * (queries + keys) + config.attention_bias * (queries + 2 * keys + config.hidden_size)
    mlp = 3 * config.hidden_size * config.intermediate_size + config.mlp_bias * (2 * config.intermediate_size + config.hidden_size)
    tables = config.vocab_size * config.hidden_size * (1 if config.tied_head else 2)
    return tables + config.layers * (attention + mlp + 2 * config.hidden_size) + config.hidden_size


def _version() -> str:
    try:
        return importlib.metadata.version("hocket")
    except importlib.metadata.PackageNotFoundError:
        return "(run from a checkout, not installed)"


async def _settle(settled: Callable[[], Awaitable[object]]) -> None:
    """What there is once the model is loaded stays. To look through it for garbage again and again would hold up every stream, for a tenth
    of a second each time."""
    from engine.core import EngineError

    with contextlib.suppress(EngineError):
        await settled()
    gc.collect()
    gc.freeze()


def _authority(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _complain(message: str) -> None:
    sys.stderr.write(f"{message}\n")


if __name__ == "__main__":
    sys.exit(main())
