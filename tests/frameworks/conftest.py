"""Tests of training frameworks, in an environment of their own: `make frameworks`. Elsewhere they are not collected."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

NEEDS = {"test_deepspeed.py": "deepspeed", "test_trackers.py": "mlflow", "test_tuning.py": "trl"}
"""The package that the tests of each file need."""

files = [path.name for path in Path(__file__).parent.glob("test_*.py")]
collect_ignore = [file for file in files if find_spec(NEEDS[file]) is None]
if len(collect_ignore) < len(NEEDS):  # before they are imported; other tests must not see this
    os.environ |= {
        "CKPT_RETAIN_SNAPSHOT_S": "0", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
    }  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def temporary_folder() -> Iterator[None]:
    """Notes of this host about runs (ckpt.host.lock) go there: another session may use the same folders again."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", name)
        patch.setattr(tempfile, "tempdir", None)
        yield
