"""The gate: which optimizer waits for which copies before it steps.

An optimizer of the save waits for the leaves in storages that it changes, and no others: a discriminator steps while
the generator is still copied. Any other optimizer waits for everything, because wrappers hide optimizers. So does every
optimizer for leaves whose own optimizer has not come to the gate by itself: some steps call no hook.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ckpt.capture.optimizers import state_holder
from ckpt.capture.parts import inner_tensors
from ckpt.snapshot.progress import EVERYONE, Part

_PLAIN = (torch.Tensor, nn.Parameter)
_captured: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""The optimizers whose step is in a CUDA graph: a replay changes state and calls no hook."""


class Gate:
    """The optimizers of one Checkpointer's saves, and what they change. Belongs to the training thread."""

    def __init__(self) -> None:
        self._came: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """Those that were about to step since the last save."""
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """Those that ever were."""
        self._numbers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._owners: dict[int, Part] | None = None
        """By address of a storage: the optimizers that change it. None: not computed yet."""
        self.hooked: Part = EVERYONE
        """The optimizers of the next save whose every step calls the hook."""

    def come(self, optimizer: Optimizer, capturing: bool) -> None:
        """An optimizer is about to step; or the step is captured into a graph."""
        self._came.add(optimizer)
        if capturing:
            _captured.add(optimizer)
        else:
            self._known.add(optimizer)

    def expect(self, optimizers: Iterable[Optimizer]) -> None:
        """These are the optimizers of the next save.

        A step that is replayed from a CUDA graph calls no hook, and no version counter moves. So an optimizer counts as
        hooked if it has called the hook, and was never captured. One with `capturable=True` is likely to be in a graph
        that was captured before: it must have called the hook since the last save.
        """
        self._numbers = weakref.WeakKeyDictionary({one: number for number, one in enumerate(optimizers)})
        self._owners = None
        self.hooked = frozenset(number for one, number in self._numbers.items() if self._is_hooked(one))

    def saved(self) -> bool:
        """A save begins. Whether an optimizer was about to step since the last one."""
        stepped = bool(self._came)
        self._came.clear()
        return stepped

    def part(self, tensor: torch.Tensor) -> Part:
        """The part that a leaf belongs to."""
        owners = self._owners_of(tensor)
        return owners if owners <= self.hooked else EVERYONE

    def waits(self, optimizer: Optimizer, parts: Iterable[Part]) -> list[Part]:
        """The parts that an optimizer waits for."""
        number = self._numbers.get(optimizer)
        return [part for part in parts if number is None or number in part or not part]

    def _is_hooked(self, optimizer: Optimizer) -> bool:
        if optimizer in _captured or optimizer not in self._known:
            return False
        return optimizer in self._came or not any(group.get("capturable") for group in optimizer.param_groups)

    def _owners_of(self, tensor: torch.Tensor) -> Part:
        if self._owners is None:
            self._owners = _owners(self._numbers)
        return self._owners.get(tensor.untyped_storage().data_ptr(), EVERYONE)


def _owners(numbers: Mapping[Optimizer, int]) -> dict[int, Part]:
    owners: dict[int, Part] = {}
    for optimizer, number in numbers.items():
        held = [group["params"] for group in optimizer.param_groups]
        found = set(map(_storage, _tensors([held, list(state_holder(optimizer).state.values())])))
        alone = frozenset((number,))  # one object for all of its tensors
        for address in found:
            owners[address] = owners[address] | alone if address in owners else alone
    owners.pop(0, None)
    return owners


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors with memory of their own in nested containers."""
    if type(value) in _PLAIN:
        yield value
    elif isinstance(value, torch.Tensor):
        if inner := inner_tensors("", value):
            yield from _tensors(inner)
        else:
            yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _storage(tensor: torch.Tensor) -> int:
    """The address of a tensor's storage; 0 if it has none."""
    local = tensor._local_tensor if type(tensor) not in _PLAIN and isinstance(tensor, DTensor) else tensor
    try:
        return local.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # a sparse or fake tensor, which is in no save
        return 0
