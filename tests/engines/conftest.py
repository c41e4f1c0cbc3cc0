"""Tests of inference engines, in an environment of their own: `make engines`. Elsewhere they are not collected."""

from __future__ import annotations

import os
from importlib.util import find_spec

from tests.support.temporary import temporary_folder as temporary_folder

collect_ignore_glob = ["test_*.py"]
if find_spec("vllm"):  # before it is imported; other tests must not see this
    collect_ignore_glob = []
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "OMP_WAIT_POLICY": "passive",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
