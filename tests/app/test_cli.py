"""The command itself: what it prints, when it says that it is ready, how it ends."""

from __future__ import annotations

import asyncio
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from app import cli
from app.cli import listen, main
from engine.core import ModelConfig
from engine.weights.cache import default_cache_dir
from tests.certificates import make_certificate
from tests.engine import tiny
from tests.serving import Server

ROOT = Path(cli.__file__).parent.parent

# A server with a small app in place of Hocket's own: these tests are about the process around it.
SERVE = """
import asyncio, gc, sys, types
from app.store import StoreError

def create_app(settings):
    loaded = asyncio.Event()
    async def app(scope, receive, send):
        if scope["type"] == "lifespan":
            await receive()
            scope["state"]["settled"] = loaded.wait
            if settings.model == "broken":
                fault = StoreError("expected a data folder of its own, but another Hocket is using it")
                await send({"type": "lifespan.startup.failed", "message": "Traceback: something long"})
                raise fault
            sys.stderr.write("started\\n"); sys.stderr.flush()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            sys.stderr.write("stopped\\n"); sys.stderr.flush()
            await send({"type": "lifespan.shutdown.complete"})
        elif scope["type"] == "http":
            if scope["path"] == "/load":
                loaded.set()
            if scope["path"] in ("/load", "/frozen"):
                answer = str(gc.get_freeze_count()).encode()
            else:
                answer = b"torch" if "torch" in sys.modules else b"light"
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": answer})
        elif scope["path"] == "/refused":
            await receive()
            await send({"type": "websocket.http.response.start", "status": 401, "headers": []})
            await send({"type": "websocket.http.response.body", "body": b"no key"})
        elif scope["path"] == "/busy":
            await receive()
            await send({"type": "websocket.accept"})
            while True:
                await send({"type": "websocket.send", "text": "x"})
                await asyncio.sleep(0)
        else:
            await receive()
            await send({"type": "websocket.accept"})
            await receive()
            await send({"type": "websocket.close", "code": 1000})
    return app

module = types.ModuleType("app.server")
module.create_app = create_app
sys.modules["app.server"] = module
from app.cli import main
sys.exit(main(["serve", *sys.argv[1:]]))
"""


@asynccontextmanager
async def serving(*flags: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVE, *flags, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(30):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def ready(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    line = (await process.stdout.readline()).decode()
    assert line.startswith("Hocket is ready: http"), line
    return line.removeprefix("Hocket is ready: ").strip()


@pytest.mark.parametrize(("end", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 130)])
async def test_serves_from_the_ready_line_to_the_signal(end: signal.Signals, code: int) -> None:
    async with serving("--port", "0") as process:
        url = await ready(process)
        assert url.startswith("http://127.0.0.1:") and not url.endswith(":0")
        async with httpx.AsyncClient() as client:
            answer = await client.get(url)
        assert answer.text == "light", "serving loads no torch"
        assert "server" not in answer.headers
        process.send_signal(end)
        rest, log = await process.communicate()
        assert process.returncode == code
        assert rest == b"", "ready is said once"
        assert log.decode().split() == ["started", "stopped"], "no traceback, no line for each connection"


async def test_frames_are_bounded_and_not_compressed() -> None:
    from websockets.asyncio.client import connect
    from websockets.exceptions import ConnectionClosed

    async with serving("--port", "0", "--max-frame-bytes", "2000") as process:
        url = (await ready(process)).replace("http", "ws")
        async with connect(url) as client:
            assert client.protocol.extensions == []
            await client.send("x" * 2000)
            with pytest.raises(ConnectionClosed) as closed:
                await client.recv()
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1000
        async with connect(url) as client:
            await client.send("x" * 2001)
            with pytest.raises(ConnectionClosed) as closed:
                await client.recv()
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1009


@pytest.mark.parametrize("path", ["/", "/busy"])
async def test_what_a_client_sends_wrong_leaves_no_line_in_the_log(path: str) -> None:
    """Whether the app waits for the client, or is sending to it."""
    from websockets.asyncio.client import connect
    from websockets.exceptions import ConnectionClosed

    async with serving("--port", "0") as process:
        url = (await ready(process)).replace("http", "ws")
        async with connect(f"{url}{path}") as client:
            await client.send(b"\xff", text=True)
            with pytest.raises(ConnectionClosed) as closed:
                while True:
                    await client.recv()
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1007
        process.terminate()
        _, log = await process.communicate()
        assert log.decode().split() == ["started", "stopped"]


async def test_https_and_wss(tmp_path: Path) -> None:
    from websockets.asyncio.client import connect

    cert, key = make_certificate(tmp_path)
    trusting = ssl.create_default_context(cafile=cert)
    async with serving("--port", "0", "--tls-cert", str(cert), "--tls-key", str(key)) as process:
        url = await ready(process)
        assert url.startswith("https://127.0.0.1:")
        async with httpx.AsyncClient(verify=trusting) as client:
            assert (await client.get(url)).text == "light"
        async with connect(url.replace("https", "wss"), ssl=trusting) as socket:
            assert socket.transport.get_extra_info("ssl_object").version() in ("TLSv1.2", "TLSv1.3")
            await socket.send("x")
            await socket.wait_closed()
            assert socket.close_code == 1000
        async with httpx.AsyncClient() as client:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await client.get(url)
            with pytest.raises(httpx.TransportError):
                await client.get(url.replace("https", "http"))


async def test_a_certificate_that_does_not_fit_is_told_in_a_line(tmp_path: Path) -> None:
    (cert, _), (_, other) = make_certificate(tmp_path, "one"), make_certificate(tmp_path, "other")
    async with serving("--port", "0", "--tls-cert", str(cert), "--tls-key", str(other)) as process:
        out, log = await process.communicate()
    assert process.returncode == 2 and out == b""
    assert f"tls_key: expected the private key of the certificate in {cert}, got another's in {other}" in log.decode()
    assert b"Traceback" not in log


async def test_a_refused_upgrade_leaves_no_line_in_the_log() -> None:
    from websockets.asyncio.client import connect
    from websockets.exceptions import InvalidStatus

    async with serving("--port", "0") as process:
        url = (await ready(process)).replace("http", "ws")
        with pytest.raises(InvalidStatus) as refused:
            await connect(f"{url}/refused")
        assert refused.value.response.status_code == 401 and refused.value.response.body == b"no key"
        process.terminate()
        _, log = await process.communicate()
        assert log.decode().split() == ["started", "stopped"]


async def test_a_start_that_people_can_mend_is_told_in_a_line() -> None:
    async with serving("--port", "0", "--model", "broken") as process:
        out, log = await process.communicate()
        assert process.returncode == 1
        assert out == b""
        assert b"another Hocket is using it" in log and b"Traceback" not in log


async def test_what_is_loaded_is_not_looked_through_for_garbage() -> None:
    async with serving("--port", "0") as process:
        url = await ready(process)
        async with httpx.AsyncClient(base_url=url) as client:
            assert (await client.get("/frozen")).text == "0"
            assert (await client.get("/load")).text == "0"
            for _ in range(100):
                if (frozen := int((await client.get("/frozen")).text)) > 0:
                    break
        assert frozen > 10_000
        process.send_signal(signal.SIGINT)
        await process.communicate()


async def test_a_port_in_use_ends_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with serving("--port", str(port)) as process:
            out, log = await process.communicate()
    assert process.returncode == 1
    assert out == b""
    assert log.decode() == f"hocket serve: cannot listen on 127.0.0.1:{port}: Address already in use\n"


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
async def test_ipv6() -> None:
    async with serving("--host", "::1", "--port", "0") as process:
        url = await ready(process)
        assert url.startswith("http://[::1]:")
        async with httpx.AsyncClient() as client:
            assert (await client.get(url)).status_code == 200


async def test_all_addresses_are_shown_as_one_to_open() -> None:
    async with serving("--host", "0.0.0.0", "--no-auth", "--port", "0") as process:
        assert (await ready(process)).startswith("http://127.0.0.1:")


def test_every_address_of_a_name_has_the_same_port() -> None:
    listeners = listen("localhost", 0)
    ports = {listener.getsockname()[1] for listener in listeners}
    assert len(ports) == 1 and ports != {0}
    with pytest.raises(OSError, match="in use"):
        listen("localhost", ports.pop())
    for listener in listeners:
        listener.close()
    with pytest.raises(OSError, match=r".+"):
        listen("no-such-name.invalid", 0)


def test_help_is_light() -> None:
    """Neither torch nor the server is imported to show flags."""
    script = "import sys\nfrom app.cli import main\ntry: main(['serve', '--help'])\nfinally: print(sorted(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "--max-batch-size N" in shown
    for heavy in ("torch", "numpy", "transformers", "uvicorn", "redis", "engine.batcher"):
        assert f"'{heavy}'" not in shown


def test_misuse(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--prot", "1"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        "hocket serve: unrecognized arguments: --prot 1",
        "usage: hocket serve [flags]; hocket serve --help lists them",
    ]
    assert main(["sevre"]) == 2
    assert "expected a command, got 'sevre'" in capsys.readouterr().err
    assert main([]) == 2
    assert "usage: hocket COMMAND" in capsys.readouterr().err


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("hocket ")
    assert main(["--help"]) == 0
    assert "hocket serve" in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        main(["serve", "--help"])
    assert end.value.code == 0


def test_a_model_that_is_not_there_is_a_clear_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    missing = tmp_path / "none.gguf"
    assert main(["model", "--model", str(missing), "--cache-dir", str(tmp_path / "cache")]) == 1
    said = capsys.readouterr()
    assert said.out == "" and str(missing) in said.err


def test_the_number_of_parameters() -> None:
    """SmolLM2-135M's shape has the number of weights its authors give (134,515,008)."""
    shape = ModelConfig(49152, 576, 1536, 30, 9, 3, 64, 8192, 1e-5, 1e5, tied_head=True)
    assert cli._parameters(shape) == 134_515_008


def test_bench_needs_a_checkout(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "site-packages" / "app" / "cli.py"))
    assert main(["bench"]) == 1
    assert "expected a checkout" in capsys.readouterr().err


def test_bench_hands_its_arguments_on(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "benchmarks"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text("import sys\nprint(sys.argv[1:])\nsys.exit(3)\n")
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "app" / "cli.py"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
        monkeypatch.delitem(sys.modules, name)
    try:
        assert main(["bench", "--rows", "8"]) == 3
    finally:
        sys.modules.pop("benchmarks", None)
    assert capsys.readouterr().out == "['--rows', '8']\n"


def cache_with_kernels(parent: Path) -> Path:
    """A cache of its own but for the user's compiled kernels."""
    (parent / "cache").mkdir()
    kernels = default_cache_dir() / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    (parent / "cache" / "kernels").symlink_to(kernels)
    return parent / "cache"


def files(folder: Path) -> dict[str, int]:
    """What lies under it, and when each was last written."""
    return {
        str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file() and path.suffix != ".done"
    }


@pytest.mark.slow
@pytest.mark.timeout(600)  # all kernels, if they were never compiled
@pytest.mark.parametrize("flags", [(), ("--weights", "int8", "--exact", "--kv-dtype", "int8")])
def test_after_warmup_a_server_makes_nothing(tmp_path: Path, flags: tuple[str, ...]) -> None:
    from engine.kernels.cpu import attention, build, choose, kv, linear, rows  # noqa: F401  (they declare the stages)
    from engine.kernels.cpu.stage import STAGES

    cache, model = cache_with_kernels(tmp_path), tiny.write_folder(tmp_path / "tiny-model")
    flags = ("--model", str(model), "--cache-dir", str(cache), *flags)
    command = [sys.executable, "-m", "app.cli", "warmup", *flags]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    lines = made.stdout.splitlines()
    assert lines[0] == f"model    tiny-model, in {cache / 'converted'}"
    assert lines[1].startswith("kernels  ") and lines[1].endswith(f", compiled for this CPU, in {build.folder(cache)}")
    assert len(lines) == 2
    stages = made.stderr.splitlines()
    assert {"converting the model", "packing the weights"} <= set(stages)
    missing = [name for name in STAGES if not (build.folder(cache) / f"{name}.done").exists()]
    assert STAGES and not missing, "every stage, not only this model's"
    before = files(cache / "converted"), files(build.folder(cache))
    server = Server(tmp_path / "data", *flags)
    server.start()
    log = server.log
    server.stop()
    assert "is loaded" in log
    for stage in ("converting", "packing", "compiling"):
        assert stage not in log
    assert (files(cache / "converted"), files(build.folder(cache))) == before


def test_warmup_without_kernels_to_compile(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = tiny.write_gguf(tmp_path / "small.gguf")
    assert main(["warmup", "--model", str(model), "--cache-dir", str(tmp_path / "cache"), "--kernels", "reference"]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines() == [
        f"model    small, in {tmp_path / 'cache' / 'converted'}",
        "kernels  plain torch, with nothing to compile",
    ]
    assert not (tmp_path / "cache" / "kernels").exists()


def test_a_warmup_that_fails_is_a_clear_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    missing = tmp_path / "none.gguf"
    assert main(["warmup", "--model", str(missing), "--cache-dir", str(tmp_path / "cache")]) == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err.splitlines()[-1].startswith("hocket warmup: ") and str(missing) in said.err


def test_warmup_takes_the_flags_of_serve(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["warmup", "--help"])
    assert end.value.code == 0 and "--kv-dtype" in capsys.readouterr().out
    assert main(["warmup", "--block-size", "8"]) == 2
    assert "multiple of 16, got 8" in capsys.readouterr().err
