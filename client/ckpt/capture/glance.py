"""A glance at the objects of a training loop: enough to tell, at little cost, whether an older description still holds.

It looks at one aspect of all tensors after the other, in loops that the interpreter does not run: half a microsecond
per tensor. Naming and describing each of them costs twenty times as much.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch._C._dynamo.guards import TensorGuards
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ckpt.capture import modules
from ckpt.capture.optimizers import state_holder
from ckpt.capture.train_state import TrainState

_TENSORS = frozenset((nn.Parameter, torch.Tensor, nn.Buffer))
_CONSTANTS = frozenset((type(None), bool, int, float, str))
_PARTS = attrgetter(
    "_parameters", "_buffers", "_non_persistent_buffers_set", "_state_dict_hooks", "_state_dict_pre_hooks"
)
_REQUIRES_GRAD: Callable[[torch.Tensor], bool] = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_OWN_WAYS = frozenset((
    "state_dict", "_save_to_state_dict", "get_extra_state", "named_parameters", "named_modules"
))  # fmt: skip
"""Methods that tell a module's state; a class that has its own is asked every time."""

_as_usual: dict[type, bool] = {}


class Glance:
    """What was seen. Equal marks: the same names for memory of the same layout, shared in the same way."""

    def __init__(self) -> None:
        self.marks: list[object] = []
        self.tensors: list[torch.Tensor] = []
        """The live ones, in the order in which they were seen."""
        self.locals: list[torch.Tensor] = []
        """What of each lies here: of a DTensor its local tensor, else the same."""

    @staticmethod
    def at(state: TrainState) -> Glance | None:
        """None if some object tells its state in ways of its own."""
        glance = Glance()
        for item, chunks in state.modules.items():
            glance.marks.append(item)
            if not all(glance._module(modules.unwrap(chunk)) for chunk in chunks):
                return None
        for item, found in state.optimizers.items():
            glance.marks.append(item)
            if not all(map(glance._optimizer, found)):
                return None
        return glance if glance._memory() else None

    def _module(self, root: nn.Module) -> bool:
        found, dicts, level = [], [], [root]
        while level:
            found += level
            below = [module._modules for module in level]
            dicts += below
            level = [child for children in below for child in children.values() if child is not None]
        parameters, buffers, hidden, hooks, pre_hooks = zip(*map(_PARTS, found), strict=True)
        if not _tell_as_usual(found) or any(hooks) or (any(pre_hooks) and not _sharding_hooks(found)):
            return False
        self.marks.append(id(root))
        self._names(dicts)
        self.marks.append([id(child) for children in dicts for child in children.values()])
        self.marks.append(list(map(frozenset, hidden)) if any(hidden) else None)
        for held in (parameters, buffers):
            self._names(held)
            begin = len(self.tensors)
            if not self._values([value for tensors in held for value in tensors.values()]):
                return False
            self.marks.append(list(map(_REQUIRES_GRAD, self.tensors[begin:])))
        return True

    def _optimizer(self, optimizer: Optimizer) -> bool:
        if (
            state_holder(optimizer) is not optimizer
            or type(optimizer).state_dict is not Optimizer.state_dict
            or optimizer._optimizer_state_dict_pre_hooks
            or optimizer._optimizer_state_dict_post_hooks
        ):
            return False
        self.marks.append(id(optimizer))
        for group in optimizer.param_groups:
            self.marks.append(list(map(id, group["params"])))
            self.marks.append(list(group.get("param_names") or ()))
            self.marks.append(bool(group.get("capturable")))
        states = list(optimizer.state.values())
        if any(type(state) is not dict for state in states):
            return False
        self.marks.append(list(map(id, optimizer.state)))
        self._names(states)
        return self._values([value for state in states for value in state.values()])

    def _names(self, found: Sequence[Mapping[str, Any]]) -> None:
        self.marks.append(list(map(len, found)))
        self.marks.append(list(chain.from_iterable(found)))

    def _values(self, values: Sequence[Any]) -> bool:
        """Keep the tensors. False if there are others than tensors and constants."""
        kinds = set(map(type, values))
        if not kinds <= _TENSORS:
            if not all(kind in _TENSORS or kind in _CONSTANTS or issubclass(kind, DTensor) for kind in kinds):
                return False
            # As text, zeros have signs.
            self.marks.append([repr(value) if type(value) in _CONSTANTS else None for value in values])
            values = [value for value in values if type(value) not in _CONSTANTS]
        self.tensors += values
        return True

    def _memory(self) -> bool:
        self.locals = self.tensors
        if not set(map(type, self.tensors)) <= _TENSORS:
            self.marks.append([tensor._spec if isinstance(tensor, DTensor) else None for tensor in self.tensors])
            self.locals = [tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in self.tensors]
        self.marks.append(list(map(id, self.tensors)))
        try:
            self.marks.append(list(map(torch.Tensor.data_ptr, self.locals)))
        except RuntimeError:
            return False  # no memory with strides, as of sparse ones
        return True


class Looks:
    """What a glance saw, to be compared with a later one. Holds no tensor."""

    def __init__(self, glance: Glance) -> None:
        self._marks = glance.marks
        first = {id(tensor): number for number, tensor in reversed(list(enumerate(glance.locals)))}
        self._distinct = sorted(first.values()) if len(first) < len(glance.locals) else None
        """Tensors that are others than those before; None: all."""
        # What torch.compile asks before it uses a graph again: types, shapes, strides, devices, and keys of dispatch,
        # which tell layouts, conjugates and negatives. A tenth of the time that asking each tensor takes.
        self._guards = TensorGuards(*self._chosen(glance), dynamic_dims_sizes=None, dynamic_dims_strides=None)

    def alike(self, glance: Glance) -> bool:
        """Whether what was described then is described alike now."""
        return self._marks == glance.marks and bool(self._guards.check(*self._chosen(glance)))

    def _chosen(self, glance: Glance) -> list[torch.Tensor]:
        return glance.locals if self._distinct is None else [glance.locals[number] for number in self._distinct]


def _tell_as_usual(found: Sequence[nn.Module]) -> bool:
    """Whether the state of modules is their parameters and buffers and nothing else, but for hooks."""
    for kind in set(map(type, found)):
        if kind not in _as_usual:
            usual = all(getattr(kind, name) is getattr(nn.Module, name) for name in _OWN_WAYS)
            _as_usual[kind] = usual and not issubclass(kind, FullyShardedDataParallel)
        if not _as_usual[kind]:
            return False
    return all(_OWN_WAYS.isdisjoint(module.__dict__) for module in found)


def _sharding_hooks(found: Sequence[nn.Module]) -> bool:
    """Whether all hooks are of fully_shard: they put shards in the place of gathered parameters, as is done already."""
    return all(isinstance(module, FSDPModule) for module in found if module._state_dict_pre_hooks)
