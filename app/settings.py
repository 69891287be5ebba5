"""Every setting of the server, in one class: from flags, `HOCKET_*` environment variables and a TOML file, in that order of weight.

Owns names, defaults, bounds and the rules between settings. Knows nothing of what the settings are used for.
"""

from __future__ import annotations

import math
import os
import tomllib
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn
from urllib.parse import urlsplit

from pydantic import Field, PrivateAttr, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, CliApp, CliSettingsSource, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from app.ephemeral import EphemeralKeys
from app.keys import KeyFileError, Keys, gather_keys
from app.security import is_loopback, own_hosts, parse_authority, parse_origin

_SECRET = ("api_key", "redis_url")  # never shown, whatever is wrong with them
_PLACEHOLDERS = {"str": "TEXT", "int": "N", "Path": "PATH", "list[str]": "A,B,...", "list[Path]": "PATH,...", "float": "X"}

_EPILOG = "Every flag is also an environment variable, as in HOCKET_MAX_QUEUE, and a name in the --config file, as in max_queue."


class SettingsError(Exception):
    """Settings that cannot be used; one line for each fault."""


def xdg_folder(variable: str, default: str) -> Path:
    """Hocket's own folder in one of the user's base folders (XDG Base Directory Specification: a relative value is ignored)."""
    base = os.environ.get(variable, "")
    return (Path(base) if base.startswith("/") else Path(default).expanduser()) / "hocket"


class Settings(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix="HOCKET_",
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        protected_namespaces=(),
        cli_kebab_case=True,
        cli_implicit_flags="toggle",
        cli_hide_none_type=True,
        cli_avoid_json=True,
    )

    config: Path | None = Field(None, description="TOML file with settings, named as here with _ for -")
    host: str = Field("127.0.0.1", description="address to listen on; others than loopback need --api-key or --no-auth")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0: any free one")
    model: str = Field("default", min_length=1, description="model to serve: a GGUF file, a Hugging Face folder or hub id")
    model_name: str | None = Field(None, min_length=1, description="name that clients know the model by; else its own")
    data_dir: Path = Field(
        default_factory=lambda: xdg_folder("XDG_DATA_HOME", "~/.local/share"),
        description="folder of the conversations, one server's alone (default: ~/.local/share/hocket)",
    )
    cache_dir: Path = Field(
        default_factory=lambda: xdg_folder("XDG_CACHE_HOME", "~/.cache"),
        description="folder of fetched and converted models (default: ~/.cache/hocket)",
    )
    store: Literal["embedded", "memory"] = Field("embedded", description="where conversations are kept; memory: until the server ends")
    redis_url: str | None = Field(None, repr=False, description="Redis or Valkey server to use in place of the embedded one")
    api_key: Annotated[list[str], NoDecode] = Field(
        [], repr=False, description="API keys that are let in: each a key (16 characters or more), or a file with `key owner` on each line"
    )
    no_auth: bool = Field(False, description="listen on other addresses than loopback without any API key")
    tls_cert: Path | None = Field(None, description="file with the certificate, and its chain, to serve https and wss with (PEM)")
    tls_key: Path | None = Field(None, description="file with the certificate's private key, without a pass phrase (PEM)")
    allowed_hosts: Annotated[list[str], NoDecode] = Field([], description="names (name or name:port) this server is reached by")
    allowed_origins: Annotated[list[str], NoDecode] = Field([], description="foreign pages (https://name:port) that may use it")
    kernels: Literal["cpu", "reference"] = Field("cpu", description="what computes: compiled kernels, or plain torch, slow and readable")
    weights: Literal["auto", "int8", "float32", "bf16"] = Field(
        "auto", description="weights in memory; auto: the model's own; int8: what is not quantised yet is, in groups of 32"
    )
    kv_dtype: Literal["float32", "bf16", "int8"] | None = Field(
        None, description="numbers of the KV cache (default: bf16; float32 with --exact)"
    )
    exact: bool = Field(False, description="activations stay float32: slower, and the tokens are those of float32")
    threads: int = Field(0, ge=0, le=1024, description="compute threads; 0: all cores")
    max_batch_size: int = Field(32, ge=1, le=4096, description="conversations that run at once")
    max_step_tokens: int = Field(128, ge=1, le=1 << 20, description="tokens in one step of the model")
    lone_step_tokens: int = Field(
        512, ge=0, le=1 << 20, description="tokens in one step while there is one request only, if more than max_step_tokens; 0: never more"
    )
    max_total_tokens: int = Field(32768, ge=1, le=1 << 30, description="tokens the KV pool holds")
    block_size: int = Field(16, ge=1, le=1024, description="tokens in a KV block")
    max_queue: int = Field(
        256,
        ge=1,
        le=1 << 20,
        description="requests that may wait for a place in the batch; owners with less than their share may come in "
        "until there are twice as many in all",
    )
    schedule_policy: Literal["fcfs", "lpm"] = Field(
        "fcfs", description="whom of one owner's waiting requests is next: the first that came, or the one of which most is cached"
    )
    max_step_ms: float = Field(
        100,
        ge=0,
        le=10_000,
        description="milliseconds that a step may take, by prediction, while replies are being written; 0: as long as it takes",
    )
    batch_window_ms: float = Field(0, ge=0, le=100, description="milliseconds that an idle engine waits for more requests to come")
    swap_space: float | None = Field(
        None,
        ge=0,
        le=1 << 20,
        description="GiB for KV blocks that fall out of the pool; another size begins anew (default: 4 with offload_dir, else 0)",
    )
    offload_dir: Path | None = Field(
        None, description="folder where these are kept, one server's alone, in place of memory: they outlive a restart"
    )
    shared_prefix: Annotated[list[Path], NoDecode] = Field(
        [], description="files, each with a system message whose cached prompt all owners share"
    )
    max_frame_bytes: int = Field(4 << 20, ge=1024, le=1 << 30, description="longest message a client may send")
    log_level: Literal["critical", "error", "warning", "info", "debug"] = Field("info", description="least grave message that is logged")

    _keys: dict[str, str] = PrivateAttr(default_factory=dict)
    _shared_prefixes: tuple[str, ...] = PrivateAttr(())

    def keys(self, ephemeral: EphemeralKeys | None = None) -> Keys:
        """Those of `api_key`, and beside them the ephemeral ones that are issued."""
        return Keys(self._keys, ephemeral)

    @property
    def hosts(self) -> list[str]:
        """Every Host header's name that is this server's."""
        return [*own_hosts(self.host), *self.allowed_hosts]

    @property
    def shared_prefixes(self) -> tuple[str, ...]:
        """The texts in the files of `shared_prefix`."""
        return self._shared_prefixes

    @property
    def swap_gib(self) -> float:
        return (4.0 if self.offload_dir else 0.0) if self.swap_space is None else self.swap_space

    @field_validator("allowed_hosts", "allowed_origins", "shared_prefix", "api_key", mode="before")
    @classmethod
    def _separated(cls, value: Any) -> Any:
        return [word.strip() for word in value.split(",") if word.strip()] if isinstance(value, str) else value

    @field_validator("api_key", mode="before")
    @classmethod
    def _keys_are_there(cls, given: Any) -> Any:
        for word in given if isinstance(given, list) else [given]:
            if isinstance(word, str) and not word.strip(" ,"):
                raise ValueError("expected a key or a file of keys, got an empty one")
        return given

    @field_validator("allowed_hosts")
    @classmethod
    def _hosts_are_hosts(cls, hosts: list[str]) -> list[str]:
        for host in hosts:
            if parse_authority(host) is None:
                raise ValueError(f"expected name or name:port, got {host!r}")
        return hosts

    @field_validator("allowed_origins")
    @classmethod
    def _origins_are_origins(cls, origins: list[str]) -> list[str]:
        for origin in origins:
            if parse_origin(origin) is None:
                raise ValueError(f"expected scheme://name or scheme://name:port, got {origin!r}")
        return origins

    @field_validator("host")
    @classmethod
    def _host_is_one(cls, host: str) -> str:
        if parse_authority(own_hosts(host)[0]) is None or (":" not in host and parse_authority(host) != (host.lower(), None)):
            raise ValueError(f"expected an address or a name to listen on, got {host!r}")
        return host

    @field_validator("redis_url")
    @classmethod
    def _redis_url_is_one(cls, url: str | None) -> str | None:
        if url is not None and not url.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError("expected redis://, rediss:// or unix://, got an address of another kind")
        try:
            _ = url and urlsplit(url).port
        except ValueError:
            raise ValueError("expected an address with a port of 0 to 65535, got another one") from None
        return url

    @field_validator("config", "data_dir", "cache_dir", "offload_dir", "tls_cert", "tls_key")
    @classmethod
    def _home_is_known(cls, path: Path | None) -> Path | None:
        return path and path.expanduser()

    @field_validator("max_step_ms", "batch_window_ms", "swap_space")
    @classmethod
    def _is_a_number(cls, number: float | None) -> float | None:
        if number is not None and not math.isfinite(number):
            raise ValueError(f"expected a finite number, got {number}")
        return number

    @model_validator(mode="after")
    def _fit_together(self) -> Settings:
        if self.max_step_tokens < self.max_batch_size:
            raise ValueError(
                f"expected max_step_tokens of at least max_batch_size, so that every conversation gets a token each step, "
                f"got {self.max_step_tokens} and {self.max_batch_size}"
            )
        if self.max_total_tokens < self.block_size:
            raise ValueError(f"expected max_total_tokens of at least block_size, got {self.max_total_tokens} and {self.block_size}")
        if self.kernels == "reference" and (self.weights != "auto" or self.kv_dtype or self.exact):
            raise ValueError("weights, kv_dtype and exact are for the cpu kernels: expected them left alone with kernels reference")
        if self.kernels == "cpu" and self.block_size % 16:
            raise ValueError(f"expected a block_size that is a multiple of 16, got {self.block_size}; kernels reference takes any")
        if self.redis_url is not None and self.store == "memory":
            raise ValueError("expected either redis_url or store memory, got both")
        if self.api_key and self.no_auth:
            raise ValueError("expected either api_key or no_auth, got both")
        if self.offload_dir and _is_file(self.offload_dir):
            raise ValueError(f"expected a folder in offload_dir, got {self.offload_dir}, which is none")
        if self.offload_dir and not self.swap_gib:
            raise ValueError("expected swap_space above 0 with offload_dir, got 0")
        self._shared_prefixes = tuple(map(_text_of, self.shared_prefix))
        if self.tls_cert or self.tls_key:
            _check_certificate(self.tls_cert, self.tls_key)
        if self.api_key:
            try:
                self._keys = gather_keys(self.api_key)
            except KeyFileError as fault:
                raise ValueError(f"api_key: {fault}") from None
        elif not self.no_auth and not is_loopback(self.host):
            raise ValueError(f"host {self.host} can be reached by others: expected api_key, or no_auth")
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, _ConfigFile(settings_cls)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a folder on the way cannot be looked into; whoever opens it says so
        return False


def _check_certificate(cert: Path | None, key: Path | None) -> None:
    """Raises: ValueError when they could not serve"""
    if cert is None or key is None:
        raise ValueError(f"expected both tls_cert and tls_key, or neither, got only {'tls_cert' if cert else 'tls_key'}")
    import ssl  # not needed otherwise

    for path, name in ((cert, "tls_cert"), (key, "tls_key")):
        try:
            path.read_bytes()
        except OSError as fault:
            raise ValueError(f"{name}: expected a PEM file at {path}: {fault.strerror}") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(cert)
    except ssl.SSLError:
        raise ValueError(f"tls_cert: expected a certificate (PEM) in {cert}, found none") from None
    try:
        context.load_cert_chain(cert, key, password=lambda: "")  # never asks the terminal
    except ssl.SSLError as fault:
        if fault.reason == "KEY_VALUES_MISMATCH":
            raise ValueError(f"tls_key: expected the private key of the certificate in {cert}, got another's in {key}") from None
        raise ValueError(f"tls_key: expected a private key (PEM) without a pass phrase in {key}, which cannot be used") from None


def _text_of(path: Path) -> str:
    """A system message, without the line breaks that an editor leaves at a file's end."""
    try:
        text = path.expanduser().read_text(encoding="utf-8").rstrip("\n")
    except (OSError, UnicodeDecodeError) as fault:
        raise ValueError(f"expected in shared_prefix a file of UTF-8 text, got {path}: {fault}") from None
    if not text:
        raise ValueError(f"expected in shared_prefix a file with a system message, got {path}, which is empty")
    return text


def load(arguments: Sequence[str], command: str) -> Settings:
    """Settings from a command's flags, the environment and the file they name. Raises: SettingsError; SystemExit(0) after --help."""
    parser = _Parser(prog=command, usage=f"{command} [flags]", allow_abbrev=False, epilog=_EPILOG)
    flags: CliSettingsSource[Settings] = CliSettingsSource(Settings, root_parser=parser, add_argument_method=_add_flag)
    try:
        return CliApp.run(Settings, cli_args=list(arguments), cli_settings_source=flags)
    except ValidationError as fault:
        raise SettingsError("\n".join(_explained(error) for error in fault.errors(include_url=False))) from None


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)


class _ConfigFile(PydanticBaseSettingsSource):
    """The TOML file that `config`, from a weightier source, names."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        raise NotImplementedError("a file is read as a whole")

    def __call__(self) -> dict[str, Any]:
        if not self.current_state.get("config"):
            return {}
        path = Path(self.current_state["config"]).expanduser()
        try:
            found = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as fault:
            raise SettingsError(f"config: expected a TOML file at {path}: {fault.strerror}") from None
        except ValueError as fault:
            raise SettingsError(f"config: expected {path} to be TOML: {fault}") from None
        unknown = sorted(found.keys() - (Settings.model_fields.keys() - {"config"}))
        if unknown:
            raise SettingsError(f"config: {path} has unknown settings: {', '.join(unknown)}")
        return found


def _add_flag(parser: ArgumentParser, *names: str, **options: Any) -> Any:
    """A flag as pydantic-settings describes it, with words for a person in place of types."""
    if options.get("metavar") in _PLACEHOLDERS:
        options["metavar"] = _PLACEHOLDERS[options["metavar"]]
    help_text = options.get("help") or ""
    if "(default factory:" in help_text or "(default: None)" in help_text or "(default: [])" in help_text:
        options["help"] = help_text[: help_text.rindex("(default")].rstrip()
    if "--api-key" in names:
        options["type"] = _given  # `--api-key "$UNSET"` must not open the server, and an empty flag would count as none
    return parser.add_argument(*names, **options)


def _given(text: str) -> str:
    if not text.strip(" ,"):
        raise ArgumentTypeError("expected a key or a file of keys, got an empty one")
    return text


def _explained(error: Any) -> str:
    where = f"{error['loc'][0]}: " if error["loc"] else ""
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        return f"{where}{message}"
    if error["loc"] and error["loc"][0] in _SECRET:
        return f"{where}{message.replace('Input should', 'expected it to')}"
    return f"{where}{message.replace('Input should', 'expected it to')}, got {str(error['input'])[:80]!r}"
