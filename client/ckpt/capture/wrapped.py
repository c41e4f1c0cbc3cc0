"""Wrapper subclasses: tensors without memory of their own, which consist of other tensors (torchao, TwoTensor).

torch's protocol `__tensor_flatten__` lists the inner tensors. They are saved and restored in place of the outer tensor,
each under its own name. A DTensor whose local tensor is a wrapper counts as a wrapper of DTensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ckptstore.errors import UnsupportedObject

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_CACHED = {
    # The scale is computed from the weight after a step; a first save lacks it. Flattening would wait for the GPU.
    "torchao.float8.fsdp_utils.WeightWithDynamicFloat8CastTensor": (("_tensor",), ("_precomputed_scale",)),
}
"""By class: the inner tensors, and attributes that cache what follows from them. The latter are not stored."""


def is_plain_type(tensor: torch.Tensor) -> bool:
    """Whether a tensor, or the local tensor of a DTensor, has memory of its own."""
    kind = type(tensor)
    if kind in _PLAIN:
        return True
    return isinstance(tensor, DTensor) and type(tensor._local_tensor) in _PLAIN


def inner_tensors(path: str, tensor: torch.Tensor) -> dict[str, torch.Tensor] | None:
    """The tensors that a wrapper consists of, by attribute; None for all other tensors.

    Raises UnsupportedObject for a sharded wrapper whose inner tensors are not sharded as the wrapper is.
    """
    if is_plain_type(tensor):
        return None
    wrapper = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if isinstance(wrapper, DTensor) or not is_traceable_wrapper_subclass(wrapper):
        return None
    known = _CACHED.get(_class_name(wrapper))
    names = known[0] if known else wrapper.__tensor_flatten__()[0]
    inner = {name: getattr(wrapper, name) for name in names}
    return {name: _distributed(path, tensor, one) for name, one in inner.items()} if wrapper is not tensor else inner


def drop_cached(tensor: torch.Tensor) -> None:
    """After a restore: forget what a wrapper has computed from its former values."""
    wrapper = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    for name in _CACHED.get(_class_name(wrapper), ((), ()))[1]:
        setattr(wrapper, name, None)


def kind_of(tensor: torch.Tensor) -> str:
    """The type of a tensor for messages: that of a DTensor includes that of its local tensor."""
    local = type(tensor._local_tensor).__name__ if isinstance(tensor, DTensor) else ""
    return type(tensor).__name__ + (f" over {local}" if local not in ("", "Tensor") else "")


def memory_address(tensor: torch.Tensor) -> int:
    """The address of a tensor's memory, of a wrapper that of its first inner tensor. 0: it has no memory."""
    while inner := inner_tensors("", tensor):
        tensor = next(iter(inner.values()))
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).data_ptr()


def _distributed(path: str, outer: DTensor, inner: torch.Tensor) -> torch.Tensor:
    if inner.shape != outer._local_tensor.shape:
        raise UnsupportedObject(
            f"tensor at {path!r} is a {kind_of(outer)} with an inner tensor of the shape {list(inner.shape)}: its "
            "placements do not show how the ranks share it",
            "Shard wrappers whose inner tensors have the shape of the wrapper, or quantize after training",
        )
    return DTensor.from_local(
        inner, outer.device_mesh, outer.placements, run_check=False, shape=outer.shape, stride=outer.stride()
    )


def _class_name(tensor: Any) -> str:
    return f"{type(tensor).__module__}.{type(tensor).__qualname__}"
