"""Tests of training frameworks, in an environment of their own: `make frameworks`. Elsewhere they are not collected."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

collect_ignore_glob = ["test_*.py"]
if find_spec("mlflow"):  # before it is imported; other tests must not see this
    collect_ignore_glob = []
    os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session", autouse=True)
def temporary_folder() -> Iterator[None]:
    """Notes of this host about runs (ckpt.host.lock) go there: another session may use the same folders again."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", name)
        patch.setattr(tempfile, "tempdir", None)
        yield
