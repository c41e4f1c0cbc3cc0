"""Bytes that several ranks need, exchanged by NCCL: needs two GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.parallel.runner import Scenario, run_scenarios

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]


def test_nccl_exchanges_what_is_read_far_away(tmp_path: Path) -> None:
    store = {"store": str(tmp_path / "store")}
    for folder in ("save", "restore"):
        (tmp_path / folder).mkdir()
    saving = Scenario("tests.ckpt.restoring.replicas:save", 2, store | {"steps": [1]})
    digests = run_scenarios([saving], tmp_path / "save")[0].result()
    restoring = Scenario("tests.ckpt.restoring.replicas:exchange_by_nccl", 2, store, timeout_s=180)
    found = run_scenarios([restoring], tmp_path / "restore")[0].result()
    assert [each["digest"] for each in found] == digests
    assert [each["own group"] for each in found] == [False] * 2
