"""Modules by canonical parameter names, whatever wraps them: DDP, torch.compile, activation checkpointing."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

# Infixes that wrappers put into names of the modules below them.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
EXTRA_STATE = "_extra_state"


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel and torch.compile."""
    while True:
        inner = module.module if isinstance(module, DistributedDataParallel) else getattr(module, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return module
        module = inner


def is_replicated(module: nn.Module) -> bool:
    """Whether the process group is known to hold equal parameters on all ranks."""
    return isinstance(module, DistributedDataParallel) or isinstance(
        getattr(module, "_orig_mod", None), DistributedDataParallel
    )


def canonical(name: str) -> str:
    """A parameter's name without what wrappers added."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def module_state(module: nn.Module) -> dict[str, Any]:
    """state_dict by canonical names; tensors alias the live ones."""
    return {canonical(name): value for name, value in unwrap(module).state_dict().items()}


def parameter_names(module: nn.Module) -> dict[int, str]:
    """id of each parameter to its canonical name; a shared parameter has its first name."""
    return {id(parameter): canonical(name) for name, parameter in unwrap(module).named_parameters()}


def gradients(module: nn.Module) -> dict[str, Any]:
    """The gradients that exist, by canonical parameter name."""
    return {
        canonical(name): parameter.grad
        for name, parameter in unwrap(module).named_parameters()
        if parameter.grad is not None
    }
