"""Every knob of the daemon. The environment variable of a field is CKPTD_ and its name in capitals."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path

from ckptstore.documents import digest
from ckptstore.errors import InvalidRequest

DEFAULT_PORT = 8470


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How one daemon runs. Raises InvalidRequest if the values make no sense together."""

    store: str
    """URL of the store it serves."""
    db: str
    """SQLAlchemy URL of its index, a cache that may be deleted at any time."""
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    """0: any free one; the log names it."""
    token: str = ""
    """Bearer token that requests must carry; empty: none."""
    insecure: bool = False
    """Listen beyond loopback although there is no token."""
    cache: str = ""
    """Folder for what was read from the store, of this daemon alone; empty: none."""
    cache_bytes: int = 10 << 30
    """It holds no more; 0: nothing."""
    store_reads: int = 16
    """Reads of the store for readers, at a time; each holds up to 4 MiB in memory."""
    poll_seconds: float = 10.0
    """Between two listings of the store."""
    commit_grace_seconds: float = 5.0
    """A finished attempt is left to its own committer for so long before the daemon commits it."""
    collect_seconds: float = 3600.0
    """Between two collections of orphans."""
    orphan_grace_seconds: float = 24 * 3600.0
    """An unfinished attempt is deleted when nothing was written to it for so long."""
    notice_seconds: float = 2.0
    """After SIGTERM: how long /readyz says no before the port is closed."""
    drain_seconds: float = 20.0
    """After that: how long open requests may take to end."""
    log_level: str = "info"

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise InvalidRequest(f"port {self.port} is not a port", "Use 0 to 65535")
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise InvalidRequest(f"log level {self.log_level!r} is unknown", "Use debug, info, warning or error")
        if self.cache_bytes < 0 or self.store_reads < 1:
            raise InvalidRequest(
                f"cache_bytes is {self.cache_bytes}, store_reads {self.store_reads}", "Use at least 0 and 1"
            )
        for name in ("poll_seconds", "collect_seconds"):
            if not getattr(self, name) > 0:
                raise InvalidRequest(f"{name} is {getattr(self, name)}", "Use a positive number of seconds")
        for name in ("commit_grace_seconds", "orphan_grace_seconds", "notice_seconds", "drain_seconds"):
            if not getattr(self, name) >= 0:
                raise InvalidRequest(f"{name} is {getattr(self, name)}", "Use a number of seconds, not below 0")
        if not (self.token or self.insecure or _is_loopback(self.host)):
            raise InvalidRequest(
                f"refusing to listen on {self.host} without a token: whoever reaches it could delete checkpoints",
                "Set CKPTD_TOKEN, listen on 127.0.0.1, or pass --insecure on a network you trust",
            )


def default_db(store: str) -> str:
    """The index in the user's state folder ($XDG_STATE_HOME, else ~/.local/state): one file per store."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return f"sqlite:///{state / 'ckptd' / digest(store.encode())[:16]}.db"


def default_cache(store: str) -> str:
    """The cache in the user's cache folder ($XDG_CACHE_HOME, else ~/.cache): one folder per store."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return str(caches / "ckptd" / digest(store.encode())[:16])


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
