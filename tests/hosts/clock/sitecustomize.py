"""Moves the wall clock of every Python that finds this folder on its PYTHONPATH: the kernel has one for all hosts.

CKPTD_TEST_CLOCK_S is added to it. The product reads the clock in one place (ckptstore/clock.py).
"""

from __future__ import annotations

import os
import time

_skew_s = float(os.environ["CKPTD_TEST_CLOCK_S"])
_true = time.time
time.time = lambda: _true() + _skew_s
