"""Torch dtypes by their names in documents."""

from __future__ import annotations

import torch

from ckptstore.codecs.dtypes import ITEM_BYTES

BY_NAME: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES if hasattr(torch, name)}
"""The dtypes of the format that this version of torch has, by name."""
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in BY_NAME.items()}
