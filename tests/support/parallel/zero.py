"""ZeroRedundancyOptimizer; its module warns when it is imported."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.distributed.optim import ZeroRedundancyOptimizer

__all__ = ["ZeroRedundancyOptimizer"]
