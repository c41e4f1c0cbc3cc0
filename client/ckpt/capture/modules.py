"""Modules by canonical parameter names, whatever wraps them: DDP, FSDP, torch.compile, activation checkpointing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from ckpt.capture.leaves import Change
from ckpt.capture.parameters import Leaf, Pack, Parameters
from ckpt.capture.parts import FlatRange
from ckptstore.errors import UnsupportedObject

# Infixes that wrappers put into names of the modules below them.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
EXTRA_STATE = "_extra_state"
PARTS = "_ckpt_parts"
"""Attribute of a module: the Parameters that an integration knows of it, with `layouts`, `packs` and `parts`."""
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Ends of the names of buffers that are of the batches of one rank."""


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel, DataParallel and torch.compile."""
    while True:
        wraps = isinstance(module, DistributedDataParallel | nn.DataParallel)
        inner = module.module if wraps else getattr(module, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return module
        module = inner


def is_replicated(module: nn.Module, raw: str, buffer: bool) -> bool:
    """Whether all ranks are known to hold equal values under a name of the module's `state_dict`."""
    ddp = getattr(module, "_orig_mod", module)
    return (
        isinstance(ddp, DistributedDataParallel)
        and raw not in ddp.parameters_to_ignore
        and (ddp.broadcast_buffers or not buffer)
        and torch.distributed.get_world_size(ddp.process_group) == torch.distributed.get_world_size()
    )


def canonical(name: str) -> str:
    """A parameter's name without what wrappers added."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def reshard(modules: Iterable[nn.Module]) -> None:
    """Have fully_shard put its shards back in the place of parameters that the last forward left gathered. Local."""
    if FSDPModule.__subclasses__():  # of which fully_shard makes one for each class that it is given
        for module in modules:
            for child in module.modules():
                if isinstance(child, FSDPModule):
                    child.reshard()


# Where torch defines what takes part in loading and is not needed where live tensors are filled.
_IN_PLACE = (
    "torch.nn.modules.module",
    "torch.nn.modules.batchnorm",
    "torch.nn.modules.instancenorm",
    "torch.distributed",
)


def own_loading(inner: nn.Module) -> tuple[tuple[str, ...], bool]:
    """The additions of an unwrapped module to torch's `load_state_dict`: the canonical prefixes of names that its own
    code sees before they are loaded, and whether there is any code, also for `state_dict` or after a load.

    Raises UnsupportedObject for such code where parameters are flattened: it needs all of them gathered.
    """
    prefixes, any_code = [], False
    for path, child in inner.named_modules(remove_duplicate=False):
        if any(map(is_own, (child._load_from_state_dict, *child._load_state_dict_pre_hooks.values()))):
            prefixes.append(canonical(path and f"{path}."))
        hooks = (*child._load_state_dict_post_hooks.values(), *child._state_dict_hooks.values())
        any_code |= any(map(is_own, (child.state_dict, child._save_to_state_dict, *hooks)))
    if is_own(inner.load_state_dict):
        prefixes = [""]
    any_code |= bool(prefixes)
    if any_code and _has_flat(inner):
        raise UnsupportedObject(
            f"a {type(inner).__name__} whose parameters are flattened has hooks or methods of its own for state_dict",
            "Use fully_shard, or remove them",
        )
    return tuple(prefixes), any_code


def is_own(function: Any) -> bool:
    """Whether a hook or method is not one of torch."""
    return not str(getattr(function, "__module__", "")).startswith(_IN_PLACE)


def _has_flat(inner: nn.Module) -> bool:
    return PARTS in vars(inner) or any(isinstance(child, FullyShardedDataParallel) for child in inner.modules())


def _raw_state(inner: nn.Module, known: Parameters) -> dict[str, Any]:
    """state_dict of an unwrapped module, of the live tensors. No collective."""
    if not _has_flat(inner):
        try:
            return inner.state_dict(keep_vars=True)
        except TypeError:  # one that is overridden
            return inner.state_dict()
    # state_dict would gather every parameter from all ranks.
    state: dict[str, Any] = dict(_unpacked(inner.named_parameters(remove_duplicate=False), known))
    for prefix, child in inner.named_modules():
        dot = f"{prefix}." if prefix else ""
        hidden = child._non_persistent_buffers_set
        state |= {dot + name: b for name, b in child._buffers.items() if b is not None and name not in hidden}
        if type(child).get_extra_state is not nn.Module.get_extra_state:
            state[dot + EXTRA_STATE] = child.get_extra_state()
    return state


def module_leaves(item: str, module: nn.Module, known: Parameters, stepped: AbstractSet[int]) -> Iterator[Leaf]:
    """The live tensors of a module's `state_dict`. stepped: ids of the parameters that optimizers update."""
    inner = unwrap(module)
    state = _raw_state(inner, known)
    for path, fields in getattr(state, "_metadata", {}).items():
        if fields != {"version": 1}:
            known.metadata[item][canonical(f"{path}.")] = fields
    for raw, value in state.items():
        name, change = canonical(raw), Change.STEP if id(value) in stepped else Change.ANY_TIME
        if isinstance(value, nn.Parameter) and not value.requires_grad:
            change = Change.NEVER
        yield known.leaf(item, name, value, f"{item}/{name}", change=change, module=inner, raw=raw)


def named_parameters(
    module: nn.Module, known: Parameters, remove_duplicate: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """Each parameter under its canonical name; a shared one under its first, or under each."""
    named = _unpacked(unwrap(module).named_parameters(remove_duplicate=remove_duplicate), known)
    return ((canonical(name), parameter) for name, parameter in named)


def _unpacked(named: Iterable[tuple[str, nn.Parameter]], known: Parameters) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, and instead of flat ones what they hold."""
    for name, parameter in named:
        pack = known.packs.get(id(parameter))
        yield from [(name, known.parts.get(id(parameter), parameter))] if pack is None else pack.views.items()


def add_flat_parameters(module: nn.Module, known: Parameters) -> None:
    """Add this rank's part of each parameter that FSDP1 flattens, and the flat ones that hide them."""
    if (parts := vars(unwrap(module)).get(PARTS)) is not None:
        for column in ("layouts", "packs", "parts"):
            getattr(known, column).update(getattr(parts, column))
    for path, unit in unwrap(module).named_modules():
        handle: Any = unit._handle if isinstance(unit, FullyShardedDataParallel) else None
        if handle is None or not handle.uses_sharded_strategy:
            continue
        flat = handle.flat_param
        # Hybrid sharding: the other groups of shards hold the same.
        ranks = tuple(torch.distributed.get_process_group_ranks(handle.process_group))
        local = getattr(flat, "_local_shard", flat).detach()  # the first forward sets it apart
        prefix = canonical(f"{path}." if path else "")
        views: dict[str, torch.Tensor] = {}
        ranges: list[FlatRange] = []
        for name, shape, info in zip(flat._fqns, flat._shapes, flat._shard_param_infos, strict=True):
            start, stop = (info.intra_param_start_idx, info.intra_param_end_idx + 1) if info.in_shard else (0, 0)
            at = info.offset_in_shard if info.in_shard else 0
            views[prefix + name] = local[at : at + stop - start]
            ranges.append(FlatRange(tuple(shape), start, stop, ranks))
        # By id only what lives on: Pack keeps its views.
        live = views.values() if flat._params is None else flat._params
        known.layouts.update(zip(map(id, live), ranges, strict=True))
        if flat._params is None:
            for name, _, owner, first, _, first_owner in flat._shared_param_infos:  # further names of tied parameters
                views[prefix + f"{owner}.{name}".lstrip(".")] = views[prefix + f"{first_owner}.{first}".lstrip(".")]
            pack = Pack(flat, local, views)
            known.packs.update(dict.fromkeys(map(id, (flat, *views.values())), pack))


def check_reduced(modules: Iterable[nn.Module]) -> None:
    """UnsupportedObject if sharded gradients are held back that are not yet reduced: they are in no parameter."""
    for child in (child for module in modules for child in module.modules()):
        if isinstance(child, FullyShardedDataParallel):
            raise UnsupportedObject(
                "gradients under FullyShardedDataParallel cannot be saved",
                "Save between two accumulation windows, without grads; or use fully_shard",
            )
        if not isinstance(child, FSDPModule):
            continue
        state: Any = child._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # torch 2.6 has one, or None
        for group in filter(None, groups):
            if any(map(_holds_back, group.fsdp_params)):
                raise UnsupportedObject(
                    "fully_shard holds gradients that are not reduced yet, as set_requires_gradient_sync(False) has it",
                    "Save with grads=True after a backward with gradient synchronization, or without grads",
                )


def _holds_back(parameter: Any) -> bool:
    unsharded = getattr(parameter, "_unsharded_param", None)
    return parameter.unsharded_accumulated_grad is not None or getattr(unsharded, "grad", None) is not None
