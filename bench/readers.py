"""Parallel readers of one object over HTTP, one process each: python -m bench.readers URL BYTES READERS.

Prints the seconds until the last reader has read the whole object, in ranges over one connection, and discarded it.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from urllib.parse import urlsplit

RANGE_BYTES = 16 << 20
_DEADLINE_S = 60.0


def main() -> None:
    """Fork the readers, wait for them, print the time."""
    url, size, num_readers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    began = time.perf_counter()
    children = [_fork(url, size, 4 * reader) for reader in range(num_readers)]
    failed = sum(os.waitpid(child, 0)[1] != 0 for child in children)
    if failed:
        sys.exit(f"{failed} of {num_readers} readers failed")
    print(time.perf_counter() - began)


def _fork(url: str, size: int, start: int) -> int:
    child = os.fork()
    if child:
        return child
    try:
        read(url, size, start)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        os._exit(1)
    os._exit(0)


def read(url: str, size: int, start: int) -> None:
    """Read the whole object from range number `start` on. Raises OSError, or ValueError for an invalid response."""
    parts = urlsplit(url)
    buffer = bytearray(1 << 20)
    offsets = range(0, size, RANGE_BYTES)
    with socket.create_connection((parts.hostname, parts.port), _DEADLINE_S) as connection:
        for index in range(len(offsets)):
            offset = offsets[(start + index) % len(offsets)]
            last = min(size, offset + RANGE_BYTES) - 1
            request = f"GET {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nRange: bytes={offset}-{last}\r\n\r\n"
            connection.sendall(request.encode())
            _drain(connection, buffer, last - offset + 1)


def _drain(connection: socket.socket, buffer: bytearray, count: int) -> None:
    head = b""
    while b"\r\n\r\n" not in head:
        part = connection.recv(4096)
        if not part:
            raise ValueError("the connection was closed")
        head += part
    if not head.startswith(b"HTTP/1.1 206"):
        raise ValueError(f"the response was {head[:200]!r}")
    done = len(head.partition(b"\r\n\r\n")[2])
    while done < count:
        got = connection.recv_into(buffer, min(len(buffer), count - done))
        if not got:
            raise ValueError("the response ended early")
        done += got


if __name__ == "__main__":
    main()
