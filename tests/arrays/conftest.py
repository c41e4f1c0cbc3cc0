"""Tests of JAX, in an environment without torch: `make test` runs them there. Elsewhere they are not collected."""

from __future__ import annotations

import os
from importlib.util import find_spec

from tests.support.temporary import temporary_folder as temporary_folder

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

collect_ignore_glob = [] if find_spec("jax") else ["test_*.py"]
