"""Tests of training frameworks, in an environment of their own: `make frameworks`. Elsewhere they are not collected."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from tests.support.temporary import temporary_folder as temporary_folder

NEEDS = {
    "test_deepspeed.py": "deepspeed", "test_megatron.py": "megatron", "test_trackers.py": "mlflow",
    "test_tuning.py": "trl",
}  # fmt: skip
"""The package that the tests of each file need."""

files = [path.name for path in Path(__file__).parent.glob("test_*.py")]
collect_ignore = [file for file in files if find_spec(NEEDS[file]) is None]
if len(collect_ignore) < len(NEEDS):  # before they are imported; other tests must not see this
    os.environ |= {
        "CKPT_RETAIN_SNAPSHOT_S": "0", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
    }  # fmt: skip
