"""Closing what is still open when the interpreter ends."""

from __future__ import annotations

import logging
import threading
import weakref
from typing import Protocol

logger = logging.getLogger(__name__)


class Closable(Protocol):
    """Holds saves that are not durable yet."""

    def close(self) -> None:
        """Return when all are."""


def close_at_exit(resource: Closable) -> None:
    """Close it when the interpreter ends, while threads may still be started; hold no reference until then."""
    reference = weakref.ref(resource)

    def close() -> None:
        found = reference()
        if found is None:
            return
        try:
            found.close()
        except Exception:
            logger.exception("a save was not durable when the interpreter ended")

    # atexit itself comes too late: thread pools refuse work by then.
    threading._register_atexit(close)  # type: ignore[attr-defined]
