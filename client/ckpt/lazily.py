"""torch, loaded when it is first used: programs with numpy and JAX state run without it.

Modules that handle models, optimizers and tensors import torch themselves, and are loaded only where there are such
objects. All others take it from here. Tensors exist only in a process that has loaded torch, so that none of them needs
to load it to recognize one.
"""

from __future__ import annotations

import sys
from functools import cache, cached_property
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
    from typing_extensions import TypeIs


class _Torch:
    """Stands for the module."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loaded, name)

    @cached_property
    def _loaded(self) -> ModuleType:
        return import_module("torch")


if not TYPE_CHECKING:
    torch = _Torch()


def torch_loaded() -> bool:
    """Whether this process has loaded torch."""
    return sys.modules.get("torch") is not None


def prefers_torch() -> bool:
    """Whether arrays without a template come back as tensors. Not in a process that has loaded JAX or TensorFlow, and
    not torch."""
    return torch_loaded() or (not {"jax", "tensorflow"} & sys.modules.keys() and _torch_installed())


@cache
def _torch_installed() -> bool:
    return find_spec("torch") is not None


def is_tensor(value: object) -> TypeIs[torch.Tensor]:
    """Whether a value is a tensor of torch."""
    return torch_loaded() and isinstance(value, torch.Tensor)
