"""The benchmark of GPUs says so where there is none."""

from __future__ import annotations

import sys

import pytest
import torch

from bench import gpu


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["python -m bench.gpu"])
    with pytest.raises(SystemExit, match="needs a CUDA device"):
        gpu.main()
