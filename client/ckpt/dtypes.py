"""Torch's element types by the names that stand in documents."""

from __future__ import annotations

import torch

from ckptstore.format.dtypes import ITEM_BYTES

BY_NAME: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES if hasattr(torch, name)}
"""Those of the format's types that this torch has."""
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in BY_NAME.items()}
