"""ckptctl as a fork at a terminal, whose descriptor is the first argument: see tests.support.command_line."""

from __future__ import annotations

import fcntl
import os
import runpy
import sys
import termios

if __name__ == "__main__":
    descriptor = int(sys.argv[1])
    os.setsid()
    fcntl.ioctl(descriptor, termios.TIOCSCTTY, 0)
    for number in range(3):
        os.dup2(descriptor, number)
    os.close(descriptor)
    sys.argv = ["", *sys.argv[2:]]
    runpy.run_module("ckptctl", run_name="__main__", alter_sys=True)
