"""What tests of the hosts ask there, and how long the network takes."""

from __future__ import annotations

import os
import socket
import sys
import time


def reaches(address: str, within_s: float = 60.0) -> bool:
    """Whether the host with an address answers: it refuses a connection to a port that nobody has."""
    try:
        socket.create_connection((address, 9), within_s).close()
    except ConnectionRefusedError:
        return True
    except TimeoutError:
        return False
    return True


def send(address: str, port: int, num_bytes: int) -> float:
    """Seconds until another host has these bytes, and this one its answer."""
    with socket.create_connection((address, port)) as connection:
        began = time.monotonic()
        connection.sendall(bytes(num_bytes))
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1)
        return time.monotonic() - began


def receive(address: str) -> None:
    """Take one connection's bytes, and answer at their end. Prints the port before."""
    with socket.create_server((address, 0)) as server:
        os.write(1, f"{server.getsockname()[1]}\n".encode())
        connection, _ = server.accept()
        with connection:
            while connection.recv(1 << 20):
                pass
            connection.sendall(b".")


if __name__ == "__main__":
    receive(sys.argv[1])
