"""What tests of the hosts ask there, and how long the network takes."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path


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


def signal_agents(number: int) -> int:
    """Send a signal to the agents of this host; their number."""
    found = _agents()
    for process in found:
        os.kill(int(process.name), number)
    return len(found)


def agents_memory() -> int:
    """The most bytes that the agents of this host had in memory at once."""
    lines = [line for process in _agents() for line in (process / "status").read_text().splitlines()]
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def _agents() -> list[Path]:
    return [path.parent for path in Path("/proc").glob("[0-9]*/cmdline") if _is_agent(path.read_bytes())]


def _is_agent(command: bytes) -> bool:
    """And not the shell that starts it again."""
    return b"ckptd\0agent" in command and not command.startswith(b"sh\0")


def sent() -> int:
    """Bytes that this host has sent to others; /sys has the counters of the machine."""
    [line] = [line for line in Path("/proc/self/net/dev").read_text().splitlines() if "eth0:" in line]
    return int(line.partition(":")[2].split()[8])


def flip(folder: str) -> int:
    """Change a byte in the middle of each shard below a folder; their number."""
    found = [path for path in Path(folder).rglob("*.ckpt") if path.stat().st_size]
    for path in found:
        with open(path, "r+b") as file:
            file.seek(path.stat().st_size // 2)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 0xFF]))
    return len(found)


if __name__ == "__main__":
    receive(sys.argv[1])
