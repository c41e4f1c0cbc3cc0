"""A slow cable: frames leave its other end some time later. Few kernels have netem.

python -m tests.hosts.latency <device in the rack> <process of the host> <seconds>
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

_TUNSETIFF, _TAP, _NO_HEADER = 0x400454CA, 0x2, 0x1000
_NEWNET = 0x40000000
_FRAME_BYTES = 65536


def main(device: str, host: int, seconds: float) -> None:
    """Until the host or the rack ends."""
    ends = [_end(device)]
    namespace = os.open(f"/proc/{host}/ns/net", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")
    ends.append(_end("eth0"))
    os.close(namespace)
    lives = os.pidfd_open(host)
    os.write(1, b".")
    under_way: deque[tuple[float, int, bytes]] = deque()
    while True:
        wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        ready = select.select([*ends, lives], [], [], wait_s)[0]
        if lives in ready:
            return
        now = time.monotonic()
        while under_way and under_way[0][0] <= now:
            _, end, frame = under_way.popleft()
            try:
                os.write(end, frame)
            except OSError:  # the device is down
                pass
        for end in ready:
            other = ends[1] if end == ends[0] else ends[0]
            under_way.append((now + seconds, other, os.read(end, _FRAME_BYTES)))


def _end(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP | _NO_HEADER))
    return device


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
