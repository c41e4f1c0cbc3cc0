"""Ports for servers that cannot take any free one themselves, or that come back on the one they had.

The system gives connections any free port, from a range above these: one of that range may be gone
when the server begins, or begins again.
"""

from __future__ import annotations

import os
import random
import socket

NEIGHBOUR = 10_000
"""SeaweedFS takes the port that is so much higher, too."""
# Each worker of pytest has its own; other programs are unlikely to choose the same at the same moment.
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_OURS = list(range(11_000 + _WORKER % 10, 21_000, 10))
random.SystemRandom().shuffle(_OURS)


def free_port() -> int:
    """A port that is free, as is its neighbour, and that was not given before."""
    while True:
        port = _OURS.pop()
        if _is_free(port) and _is_free(port + NEIGHBOUR):
            return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
