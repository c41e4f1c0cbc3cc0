"""Every knob of the daemon: name, default, meaning. ckptd.configuration finds out what they are set to."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from ckptstore.errors import InvalidRequest
from ckptstore.format.documents import digest

DEFAULT_PORT = 8470
AUTH_OFF = "off"
MIN_TOKEN = 16
_CHOICES = {
    "auth": ("on", AUTH_OFF),
    "log_level": ("debug", "info", "warning", "error"),
    "log_format": ("text", "json"),
}
_LONGEST = 1e9
"""Of any number of seconds or days: more than the system can wait for is a mistake."""
_POSITIVE = ("poll_seconds", "collect_seconds", "leader_lease_seconds")
_NOT_NEGATIVE = (
    "commit_grace_seconds", "orphan_grace_seconds", "notice_seconds", "drain_seconds", "scrub_days",
    "scrub_bytes_per_second", "cache_bytes",
)  # fmt: skip


def _knob(default: Any, text: str, secret: bool = False) -> Any:
    return field(default=default, metadata={"text": text, "secret": secret})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How one daemon runs. Raises InvalidRequest if the values make no sense together."""

    store: str = _knob("", "URL of the store: file:///folder, s3://bucket/folder.")
    db: str = _knob("", "SQLAlchemy URL of the index. Default: a file in the state folder.")
    host: str = _knob("127.0.0.1", "Address to listen on.")
    port: int = _knob(DEFAULT_PORT, "0: any free one; the log names it.")
    auth: str = _knob("on", "Every request must carry a token; off: on loopback only.")
    token: str = _knob("", "A token that may do everything, beside those in the index.", secret=True)
    tls_cert: str = _knob("", "PEM file of the certificate and its chain; with --tls-key, serve https only.")
    tls_key: str = _knob("", "PEM file of the certificate's key.")
    cache: str = _knob("", "Folder for what was read from the store. Default: in the user's cache folder.")
    cache_bytes: int = _knob(10 << 30, "The cache holds no more; 0: no cache.")
    store_reads: int = _knob(16, "Reads of the store for readers, at a time; each holds up to 4 MiB in memory.")
    poll_seconds: float = _knob(10.0, "Between two listings of the store.")
    commit_grace_seconds: float = _knob(5.0, "A finished attempt is left to its own committer for so long.")
    leader_lease_seconds: float = _knob(
        15.0, "Of daemons on one PostgreSQL one leads; if it is gone, another one does after so long at the latest."
    )
    collect_seconds: float = _knob(3600.0, "Between two collections of orphans.")
    orphan_grace_seconds: float = _knob(
        24 * 3600.0, "An unfinished attempt is deleted when nothing was written to it for so long."
    )
    scrub_days: float = _knob(
        0.0, "Every checkpoint is read whole again so many days after it was last found whole; 0: never."
    )
    scrub_bytes_per_second: int = _knob(50_000_000, "The scrub reads no faster; 0: as fast as it can.")
    notice_seconds: float = _knob(2.0, "After SIGTERM: how long /readyz says no before the port is closed.")
    drain_seconds: float = _knob(20.0, "After that: how long open requests may take to end.")
    webhooks: str = _knob("", "URLs, with commas between them, that events are posted to.")
    webhook_secret: str = _knob("", "Signs what is posted.", secret=True)
    log_level: str = _knob("info", "debug, info, warning or error.")
    log_format: str = _knob("text", "text, or json: one object a line.")
    otlp_endpoint: str = _knob("", "Where to send traces: an OTLP collector's HTTP address. Empty: nowhere.")

    @property
    def webhook_urls(self) -> list[str]:
        """The URLs of `webhooks`, one by one."""
        return [url.strip() for url in self.webhooks.split(",") if url.strip()]

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise InvalidRequest(f"{name} is {getattr(self, name)!r}", f"Use one of: {', '.join(allowed)}")
        if not self.store:
            raise InvalidRequest("no store is given", "Pass --store URL, or set CKPTD_STORE")
        if not 0 <= self.port <= 65535:
            raise InvalidRequest(f"port {self.port} is not a port", "Use 0 to 65535")
        if self.store_reads < 1:
            raise InvalidRequest(f"store_reads is {self.store_reads}", "Use at least 1")
        self._check_numbers()
        self._check_exposure()

    def _check_numbers(self) -> None:
        for name in _POSITIVE:
            if not getattr(self, name) > 0:
                raise InvalidRequest(f"{name} is {getattr(self, name)}", "Use a positive number of seconds")
        for name in _NOT_NEGATIVE:
            if not getattr(self, name) >= 0:
                raise InvalidRequest(f"{name} is {getattr(self, name)}", "Use a number, not below 0")
        for knob in KNOBS:
            if isinstance(knob.default, float) and getattr(self, knob.name) > _LONGEST:
                raise InvalidRequest(f"{knob.name} is {getattr(self, knob.name)}", f"Use at most {_LONGEST:.0f}")

    def _check_exposure(self) -> None:
        if bool(self.tls_cert) != bool(self.tls_key):
            raise InvalidRequest("of tls_cert and tls_key only one is given", "Give both, or neither")
        if self.auth == AUTH_OFF and not is_loopback(self.host):
            raise InvalidRequest(
                f"refusing to listen on {self.host} with auth off: whoever reaches it could delete checkpoints",
                "Leave auth on and make tokens (ckptd token create), or listen on 127.0.0.1",
            )
        if 0 < len(self.token) < MIN_TOKEN:
            raise InvalidRequest(
                f"the token has {len(self.token)} characters", f"Use {MIN_TOKEN}: openssl rand -hex 32"
            )
        if self.auth == AUTH_OFF and self.token:
            raise InvalidRequest("auth is off, and yet a token is given", "Drop one of them: which one is meant?")


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
    """Whether an address, or a name, is this machine's own and nobody else's."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
