"""Flags weigh more than the environment, the environment more than the file, and nothing unknown or unfit is taken."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from app.keys import KeyRefusedError
from app.settings import Settings, SettingsError, load
from tests.certificates import make_certificate


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(("HOCKET_", "XDG_")):
            monkeypatch.delenv(name)


def loaded(*flags: str) -> Settings:
    return load(flags, "hocket serve")


def owner(settings: Settings, key: str = "") -> str:
    return settings.keys().caller({"type": "http", "path": "/v1/models", "headers": [(b"api-key", key.encode())]}).owner


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    return make_certificate(tmp_path)


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ana")
    settings = loaded()
    assert (settings.host, settings.port, settings.model, settings.model_name) == ("127.0.0.1", 8000, "default", None)
    assert settings.data_dir == Path("/home/ana/.local/share/hocket")
    assert settings.cache_dir == Path("/home/ana/.cache/hocket")
    assert (settings.store, settings.redis_url) == ("embedded", None)
    assert (settings.max_batch_size, settings.max_step_tokens, settings.max_total_tokens, settings.block_size) == (32, 128, 32768, 16)
    assert settings.lone_step_tokens == 512
    assert (settings.schedule_policy, settings.max_step_ms, settings.batch_window_ms) == ("fcfs", 100, 0)
    assert (settings.swap_gib, settings.offload_dir, settings.shared_prefixes) == (0, None, ())
    assert (settings.threads, settings.max_queue, settings.max_frame_bytes, settings.log_level) == (0, 256, 4 * 1024 * 1024, "info")
    assert (settings.api_key, settings.tls_cert, settings.tls_key) == ([], None, None)
    assert owner(settings) == "local"
    assert settings.hosts == ["127.0.0.1", "localhost", "127.0.0.1", "[::1]"]
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert loaded().data_dir == Path("/data/hocket")
    assert loaded().cache_dir == Path("/home/ana/.cache/hocket")


def test_which_source_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "hocket.toml"
    file.write_text('port = 1\nmax_queue = 1\nthreads = 1\nallowed_hosts = ["a", "b:2"]\nno_auth = true\n')
    monkeypatch.setenv("HOCKET_CONFIG", str(file))
    monkeypatch.setenv("HOCKET_MAX_QUEUE", "2")
    monkeypatch.setenv("HOCKET_THREADS", "2")
    monkeypatch.setenv("HOCKET_MODEL", "")
    settings = loaded("--threads", "3")
    assert (settings.port, settings.max_queue, settings.threads, settings.model) == (1, 2, 3, "default")
    assert settings.allowed_hosts == ["a", "b:2"] and settings.no_auth
    other = tmp_path / "other.toml"
    other.write_text("port = 9")
    assert loaded("--config", str(other)).port == 9


def test_lists_are_separated_by_commas_or_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loaded("--allowed-hosts", "a, b:1", "--allowed-hosts", "c").allowed_hosts == ["a", "b:1", "c"]
    monkeypatch.setenv("HOCKET_ALLOWED_ORIGINS", "https://a,http://b:1")
    assert loaded().allowed_origins == ["https://a", "http://b:1"]


def test_home_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ana")
    assert loaded("--data-dir", "~/x").data_dir == Path("/home/ana/x")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--bogus", "1"], "unrecognized arguments: --bogus"),
        (["--por", "1"], "unrecognized arguments: --por"),
        (["word"], "unrecognized arguments: word"),
        (["--port"], "--port: expected one argument"),
        (["--port", "x"], "port: expected it to be a valid integer.*got 'x'"),
        (["--port", "65536"], "port: expected it to be less than or equal to 65535, got '65536'"),
        (["--lone-step-tokens", "-1"], "lone_step_tokens: expected it to be greater than or equal to 0"),
        (["--threads", "-1"], "threads: expected it to be greater than or equal to 0"),
        (["--store", "disk"], "store: expected it to be 'embedded' or 'memory', got 'disk'"),
        (["--host", "a/b"], "host: expected an address or a name"),
        (["--host", "127.0.0.1:8000"], "host: expected an address or a name"),
        (["--host", "0.0.0.0"], "host 0.0.0.0 can be reached by others: expected api_key"),
        (["--host", "example.org"], "host example.org can be reached by others"),
        (["--allowed-hosts", "ok,http://x"], "allowed_hosts: expected name or name:port, got 'http://x'"),
        (["--allowed-origins", "null"], "allowed_origins: expected scheme://name"),
        (["--allowed-origins", "https://x/path"], "allowed_origins: expected scheme://name"),
        (["--redis-url", "http://u:SECRET@x"], "redis_url: expected redis://"),
        (["--redis-url", "redis://:SECRET@x:abc"], "redis_url: expected an address with a port"),
        (["--redis-url", "redis://x", "--store", "memory"], "either redis_url or store memory"),
        (["--max-step-tokens", "8"], "expected max_step_tokens of at least max_batch_size"),
        (["--max-total-tokens", "8"], "expected max_total_tokens of at least block_size"),
        (["--config", "/none.toml"], "config: expected a TOML file at /none.toml: No such file"),
        (["--api-key", "/none"], "expected a file of API keys at /none: No such file"),
    ],
)
def test_what_is_refused(flags: list[str], expected: str) -> None:
    with pytest.raises(SettingsError, match=expected) as caught:
        loaded(*flags)
    assert "SECRET" not in str(caught.value)


def test_every_fault_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOCKET_PORT", "tcp://10.0.0.1:8000")
    with pytest.raises(SettingsError, match=r"(?s)port: .*\n.*block_size: "):
        loaded("--block-size", "0")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("prot = 1", "unknown settings: prot"),
        ('config = "x"', "unknown settings: config"),
        ("port = ", "to be TOML"),
        ('port = "x"', "port: expected it to be a valid integer"),
        ("allowed_hosts = 3", "allowed_hosts: expected it to be a valid list"),
    ],
)
def test_what_a_file_may_not_say(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "hocket.toml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=expected):
        loaded("--config", str(file))


def test_keys_open_other_addresses_and_stay_secret(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("SECRET-of-someone-1 ana\n")
    settings = loaded("--host", "0.0.0.0", "--api-key", str(file), "--redis-url", "redis://:SECRET@x")
    assert owner(settings, "SECRET-of-someone-1") == "ana"
    assert "SECRET" not in repr(settings) + str(settings)
    with pytest.raises(SettingsError, match="either api_key or no_auth"):
        loaded("--api-key", str(file), "--no-auth")
    assert loaded("--host", "0.0.0.0", "--no-auth").hosts[0] == "0.0.0.0"
    file.write_text("SECRET-of-someone-1 ana\nSECRET-of-someone-1 ben\n")
    with pytest.raises(SettingsError, match=r"api_key: .*, line 2: the key of .*, line 1 again") as caught:
        loaded("--api-key", str(file))
    assert "SECRET" not in str(caught.value)


def test_keys_come_by_themselves_and_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, config = tmp_path / "keys", tmp_path / "hocket.toml"
    file.write_text("SECRET-of-someone-1 ana\n")
    settings = loaded("--api-key", "SECRET-of-someone-2", "--api-key", str(file), "--api-key", "SECRET-of-someone-3", "--host", "0.0.0.0")
    own = [owner(settings, key) for key in ("SECRET-of-someone-1", "SECRET-of-someone-2", "SECRET-of-someone-3")]
    assert own[0] == "ana" and all(re.fullmatch("key-[0-9a-f]{12}", name) for name in own[1:]) and len(set(own)) == 3
    assert "SECRET" not in repr(settings) + str(settings)
    for given in (f'api_key = ["SECRET-of-someone-2", "{file}"]', f'api_key = "SECRET-of-someone-2, {file}"'):
        config.write_text(given)
        settings = loaded("--config", str(config))
        assert [owner(settings, key) for key in ("SECRET-of-someone-1", "SECRET-of-someone-2")] == own[:2]
    monkeypatch.setenv("HOCKET_API_KEY", f"SECRET-of-someone-3,{file}")
    settings = loaded("--config", str(config))
    assert [owner(settings, key) for key in ("SECRET-of-someone-1", "SECRET-of-someone-3")] == ["ana", own[2]]
    with pytest.raises(KeyRefusedError):
        owner(settings, "SECRET-of-someone-2")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ('api_key = ""', "expected a key or a file of keys, got an empty one"),
        ('api_key = ["k", " "]', "expected a key or a file of keys, got an empty one"),
        ("api_key = 5303", "expected it to be a valid list"),
        ("api_key = [5303]", "expected it to be a valid string"),
        ('api_key = ["key-of-somebody-1", "SECRET 5303"]', "key 2: expected the path of a file, or a key of"),
        ('api_key = ["5303530353035303", "5303530353035303"]', "key 2: the key of key 1 again"),
    ],
)
def test_keys_that_cannot_be_used_are_not_shown(tmp_path: Path, given: str, expected: str) -> None:
    config = tmp_path / "hocket.toml"
    config.write_text(given)
    with pytest.raises(SettingsError, match=f"^api_key: {expected}") as caught:
        loaded("--config", str(config))
    assert "5303" not in str(caught.value)


def test_an_empty_key_opens_nothing() -> None:
    """`--api-key "$UNSET"`"""
    for given in ("", " ", ","):
        with pytest.raises(SettingsError, match="--api-key: expected a key or a file of keys, got an empty one"):
            loaded("--api-key", given)


def test_a_certificate_and_its_key(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    cert, key = certificate
    settings = loaded("--tls-cert", str(cert), "--tls-key", str(key))
    assert (settings.tls_cert, settings.tls_key) == (cert, key)
    (tmp_path / "other").mkdir()
    _, other = make_certificate(tmp_path / "other")
    _, locked = make_certificate(tmp_path / "other", "locked", "-passout", "pass:SECRET")
    for flags, expected in (
        (["--tls-cert", str(cert)], "expected both tls_cert and tls_key, or neither, got only tls_cert"),
        (["--tls-key", str(key)], "expected both tls_cert and tls_key, or neither, got only tls_key"),
        (["--tls-cert", "/none.pem", "--tls-key", str(key)], "tls_cert: expected a PEM file at /none.pem: No such file"),
        (["--tls-cert", str(cert), "--tls-key", str(tmp_path)], f"tls_key: expected a PEM file at {tmp_path}: Is a directory"),
        (["--tls-cert", str(key), "--tls-key", str(key)], f"tls_cert: expected a certificate .PEM. in {key}, found none"),
        (["--tls-cert", str(cert), "--tls-key", str(cert)], f"tls_key: expected a private key .PEM. without a pass phrase in {cert}"),
        (["--tls-cert", str(cert), "--tls-key", str(locked)], f"tls_key: expected a private key .PEM. without a pass phrase in {locked}"),
        (
            ["--tls-cert", str(cert), "--tls-key", str(other)],
            f"tls_key: expected the private key of the certificate in {cert}, got another's",
        ),
    ):
        with pytest.raises(SettingsError, match=expected):
            loaded(*flags)


def test_settings_do_not_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        loaded().port = 1


def test_a_misspelt_setting_in_code_is_refused() -> None:
    with pytest.raises(ValueError, match="Extra inputs are not permitted"):
        Settings(prot=1)  # type: ignore[call-arg]


def test_the_tier_has_a_size_of_its_own_when_it_has_a_folder(tmp_path: Path) -> None:
    assert loaded("--offload-dir", str(tmp_path)).swap_gib == 4
    assert loaded("--offload-dir", str(tmp_path), "--swap-space", "0.5").swap_gib == 0.5
    assert loaded("--swap-space", "2").swap_gib == 2
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match="expected a folder in offload_dir"):
        loaded("--offload-dir", str(tmp_path / "file"))
    with pytest.raises(SettingsError, match="expected swap_space above 0 with offload_dir"):
        loaded("--offload-dir", str(tmp_path), "--swap-space", "0")


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--batch-window-ms", "101"),
        ("--batch-window-ms", "nan"),
        ("--max-step-ms", "-1"),
        ("--swap-space", "inf"),
        ("--schedule-policy", "sjf"),
    ],
)
def test_bounds_of_the_scheduler(flag: str, value: str) -> None:
    with pytest.raises(SettingsError, match=rf"^{flag[2:].replace('-', '_')}: expected .* got"):
        loaded(flag, value)


def test_shared_prefixes_are_files_with_a_system_message(tmp_path: Path) -> None:
    one, two = tmp_path / "one.txt", tmp_path / "two.txt"
    one.write_text("You are Ana.\n\n")
    two.write_text("You are\nBen.")
    assert loaded("--shared-prefix", f"{one},{two}").shared_prefixes == ("You are Ana.", "You are\nBen.")
    two.write_text("\n")
    for path in (two, tmp_path / "none.txt"):
        with pytest.raises(SettingsError, match="expected in shared_prefix a file"):
            loaded("--shared-prefix", str(path))
