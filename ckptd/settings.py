"""Every setting of the daemon: name, default and meaning, and where its value comes from: flag, environment, file."""

from __future__ import annotations

import ipaddress
import os
import tomllib
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from ckptd.redaction import MASK, mask_passwords
from ckptstore.errors import InvalidRequest
from ckptstore.format.documents import digest
from ckptstore.reading.restore_check import MAX_RANKS

DEFAULT_PORT = 8470
AUTH_OFF = "off"
MIN_TOKEN = 16
_CHOICES = {
    "auth": ("on", AUTH_OFF),
    "log_level": ("debug", "info", "warning", "error"),
    "log_format": ("text", "json"),
}
_LONGEST = 1e9
"""Upper bound of all numbers of seconds or days; the system cannot wait longer."""
_POSITIVE = ("poll_seconds", "collect_seconds", "leader_lease_seconds", "header_timeout_seconds")
_NOT_NEGATIVE = (
    "commit_grace_seconds", "orphan_grace_seconds", "notice_seconds", "drain_seconds", "scrub_days", "verify_hours",
    "scrub_bytes_per_second", "cache_bytes", "connections_per_client",
)  # fmt: skip


def _knob(default: Any, text: str, secret: bool = False) -> Any:
    return field(default=default, metadata={"text": text, "secret": secret})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of one daemon. Raises InvalidRequest if the values contradict each other."""

    store: str = _knob("", "URL of the store: file:///folder, s3://bucket/folder.")
    db: str = _knob("", "SQLAlchemy URL of the index. Default: a file in the state folder.")
    host: str = _knob("127.0.0.1", "Address to listen on.")
    port: int = _knob(DEFAULT_PORT, "Port to listen on; 0: any free port, which is logged.")
    auth: str = _knob("on", "Every request must carry a token; off: on loopback only.")
    token: str = _knob("", "A token with all scopes, in addition to those in the index.", secret=True)
    tls_cert: str = _knob("", "PEM file of the certificate and its chain; with --tls-key, serve https only.")
    tls_key: str = _knob("", "PEM file of the certificate's key.")
    header_timeout_seconds: float = _knob(
        10.0, "A connection is closed if the headers of its next request are not complete within this time."
    )
    connections_per_client: int = _knob(
        256, "Maximum number of open connections from one address, also if it is a proxy; 0: unlimited."
    )
    cache: str = _knob("", "Folder for data read from the store. Default: in the user's cache folder.")
    cache_bytes: int = _knob(10 << 30, "Maximum size of the cache; 0: no cache.")
    store_reads: int = _knob(
        16, "Maximum number of concurrent store reads for clients; each holds up to 4 MiB in memory."
    )
    poll_seconds: float = _knob(10.0, "Seconds between listings of the store.")
    commit_grace_seconds: float = _knob(
        5.0, "Time that a complete attempt is left to its own committer before the daemon commits it."
    )
    leader_lease_seconds: float = _knob(
        15.0, "Maximum time until another daemon on the same PostgreSQL takes over from a leader that is gone."
    )
    collect_seconds: float = _knob(3600.0, "Seconds between collections of orphans.")
    orphan_grace_seconds: float = _knob(
        24 * 3600.0, "An unfinished attempt is deleted after nothing was written to it for this time."
    )
    scrub_days: float = _knob(0.0, "Days after which a checkpoint is read completely and verified again; 0: never.")
    scrub_bytes_per_second: int = _knob(50_000_000, "Maximum read rate of the scrub; 0: unlimited.")
    verify_hours: float = _knob(
        0.0, "Hours after which a run's newest checkpoint is verified, restored in part, before others; 0: never."
    )
    verify_ranks: str = _knob(
        "", "Comma-separated numbers of ranks on which it must restore, in addition to the number that saved."
    )
    jobs_on: str = _knob(
        "", "Where verify and heal jobs work: local:8, dask://HOST:8786, ray://HOST:10001. Empty: in the daemon."
    )
    notice_seconds: float = _knob(2.0, "After SIGTERM: time that /readyz fails before the port is closed.")
    drain_seconds: float = _knob(20.0, "After that: time for open requests to finish.")
    webhooks: str = _knob(
        "", "Comma-separated URLs to which events are posted; chat+https://... for Slack or Mattermost."
    )
    webhook_secret: str = _knob("", "Secret that signs the posted events.", secret=True)
    log_level: str = _knob("info", "debug, info, warning or error.")
    log_format: str = _knob("text", "text, or json with one object per line.")
    otlp_endpoint: str = _knob("", "HTTP address of an OTLP collector for traces. Empty: no traces.")

    @property
    def webhook_urls(self) -> list[str]:
        """The URLs of `webhooks`, one by one."""
        return [url.strip() for url in self.webhooks.split(",") if url.strip()]

    @property
    def verify_rank_counts(self) -> list[int]:
        """The numbers in `verify_ranks`. Raises InvalidRequest."""
        texts = [text.strip() for text in self.verify_ranks.split(",") if text.strip()]
        if not all(text.isascii() and text.isdigit() and 1 <= int(text) <= MAX_RANKS for text in texts):
            raise InvalidRequest(f"verify_ranks is {self.verify_ranks!r}", f"Use numbers from 1 to {MAX_RANKS}: 8,512")
        return [int(text) for text in texts]

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise InvalidRequest(f"{name} is {getattr(self, name)!r}", f"Use one of: {', '.join(allowed)}")
        if not self.store:
            raise InvalidRequest("no store is given", "Pass --store URL, or set CKPTD_STORE")
        if not 0 <= self.port <= 65535:
            raise InvalidRequest(f"port is {self.port}", "Use 0 to 65535")
        if self.store_reads < 1:
            raise InvalidRequest(f"store_reads is {self.store_reads}", "Use at least 1")
        self._check_numbers()
        self._check_exposure()
        _ = self.verify_rank_counts

    def _check_numbers(self) -> None:
        for name in _POSITIVE:
            if not getattr(self, name) > 0:
                raise InvalidRequest(f"{name} is {getattr(self, name)}", "Use a positive number of seconds")
        for name in _NOT_NEGATIVE:
            if not getattr(self, name) >= 0:
                raise InvalidRequest(f"{name} is {getattr(self, name)}", "Use a number of at least 0")
        for knob in KNOBS:
            if isinstance(knob.default, float) and getattr(self, knob.name) > _LONGEST:
                raise InvalidRequest(f"{knob.name} is {getattr(self, knob.name)}", f"Use at most {_LONGEST:.0f}")

    def _check_exposure(self) -> None:
        if bool(self.tls_cert) != bool(self.tls_key):
            raise InvalidRequest("only one of tls_cert and tls_key is set", "Set both, or neither")
        if self.auth == AUTH_OFF and not is_loopback(self.host):
            raise InvalidRequest(
                f"refusing to listen on {self.host} with auth off: every host that reaches it could delete checkpoints",
                "Leave auth on and create tokens (ckptd token create), or listen on 127.0.0.1",
            )
        if 0 < len(self.token) < MIN_TOKEN:
            raise InvalidRequest(
                f"the token has {len(self.token)} characters", f"Use at least {MIN_TOKEN}: openssl rand -hex 32"
            )
        if self.auth == AUTH_OFF and self.token:
            raise InvalidRequest("auth is off, but a token is set", "Remove one of them")


KNOBS: tuple[Field[Any], ...] = fields(Settings)


def default_db(store: str) -> str:
    """The index in the user's state folder ($XDG_STATE_HOME, else ~/.local/state): one file per store."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return f"sqlite:///{state / 'ckptd' / digest(store.encode())[:16]}.db"


def default_cache(store: str) -> str:
    """The cache in the user's cache folder ($XDG_CACHE_HOME, else ~/.cache): one folder per store."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return str(caches / "ckptd" / digest(store.encode())[:16])


def is_loopback(host: str) -> bool:
    """Whether an address or host name is a loopback address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


PREFIX = "CKPTD_"
FILE_VARIABLE = f"{PREFIX}CONFIG"
_TYPES: dict[str, type[Any]] = {knob.name: type(knob.default) for knob in KNOBS}
_KINDS = {str: "a string", int: "a whole number", float: "a number"}
_DEFAULT = "default"


class Configuration(NamedTuple):
    """The settings in force, and where each comes from."""

    settings: Settings
    origins: Mapping[str, str]

    def lines(self) -> list[tuple[str, str, str]]:
        """Name, value and origin of each, with secrets masked."""
        return [(knob.name, self._shown(knob.name, knob.metadata["secret"]), self.origins[knob.name]) for knob in KNOBS]

    def _shown(self, name: str, secret: bool) -> str:
        value = str(getattr(self.settings, name))
        return (MASK if value else "") if secret else mask_passwords(value)


def load(flags: Mapping[str, str | None], environment: Mapping[str, str]) -> Configuration:
    """The settings of one call. flags: by name of the setting, None if not given; `config` is the file.

    Raises InvalidRequest, which names the source of an invalid value.
    """
    values: dict[str, Any] = {}
    origins = dict.fromkeys(_TYPES, _DEFAULT)
    path = flags.get("config") or environment.get(FILE_VARIABLE)
    if path:
        for name, value in _read_file(path).items():
            values[name], origins[name] = value, f"file {path}"
    for name in _TYPES:
        variable = PREFIX + name.upper()
        flag = flags.get(name)
        if flag is not None:
            origins[name] = f"flag --{name.replace('_', '-')}"
            values[name] = _parse(name, flag, origins[name])
        elif text := environment.get(variable, "").strip():
            origins[name] = f"environment {variable}"
            values[name] = _parse(name, text, origins[name])
    if store := values.get("store"):
        values["db"] = values.get("db") or default_db(store)
        values["cache"] = values.get("cache") or default_cache(store)
    return Configuration(Settings(**values), origins)


def _read_file(path: str) -> dict[str, Any]:
    try:
        found = tomllib.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidRequest(f"cannot read the settings in {path}: {error}", "It must be a TOML file") from error
    return {name: _checked(name, value, path) for name, value in found.items()}


def _checked(name: str, value: Any, path: str) -> Any:
    kind = _TYPES.get(name)
    if kind is None:
        raise InvalidRequest(f"{path} sets {name!r}, which is not a setting", f"The settings are: {', '.join(_TYPES)}")
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise InvalidRequest(f"{path} sets {name} to a {type(value).__name__}", f"Use {_KINDS[kind]}")
    return value


def _parse(name: str, text: str, where: str) -> Any:
    kind = _TYPES[name]
    try:
        return kind(text)
    except ValueError as error:
        raise InvalidRequest(f"{where} is {text!r}", f"Use {_KINDS[kind]}") from error
