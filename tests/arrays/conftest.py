"""Tests of JAX, in an environment without torch: `make test` runs them there. Elsewhere they are not collected."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

collect_ignore_glob = [] if find_spec("jax") else ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def temporary_folder() -> Iterator[None]:
    """A TensorFlow that is killed leaves the functions that it generated in the folder for temporary files."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", name)
        patch.setattr(tempfile, "tempdir", None)
        yield
