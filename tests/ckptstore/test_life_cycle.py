"""The whole life of checkpoints on a store.

CKPTD_LIFE_CYCLES says how many lives are tried; a few by default.
"""

from __future__ import annotations

from tests.support.life_cycle import LifeCycle, lives

TestLifeCycle = LifeCycle.TestCase
TestLifeCycle.settings = lives(30)
