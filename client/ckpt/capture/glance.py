"""A glance at the objects of a training loop: enough to tell, at little cost, whether an older description still holds.

It costs less than a microsecond per tensor; naming and describing each of them costs ten times as much.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ckpt.capture import modules
from ckpt.capture.optimizers import state_holder
from ckpt.capture.subject import Subject

_TENSORS = frozenset((nn.Parameter, torch.Tensor, nn.Buffer))
_CONSTANTS = frozenset((type(None), bool, int, float, str))
_OWN_WAYS = ("state_dict", "_save_to_state_dict", "get_extra_state", "named_parameters", "named_modules")
"""Methods that tell a module's state; a class that has its own is asked every time."""

_as_usual: dict[type, bool] = {}


class Glance:
    """What was seen. Equal marks: the same names for memory of the same layout, shared in the same way."""

    def __init__(self) -> None:
        self.marks: list[object] = []
        self.tensors: list[torch.Tensor] = []
        """The live ones, in the order in which they were seen."""

    @staticmethod
    def at(subject: Subject) -> Glance | None:
        """None if some object tells its state in ways of its own."""
        glance = Glance()
        for item, chunks in subject.modules.items():
            glance.marks.append(item)
            if not all(glance._module(modules.unwrap(chunk)) for chunk in chunks):
                return None
        for item, found in subject.optimizers.items():
            glance.marks.append(item)
            if not all(map(glance._optimizer, found)):
                return None
        return glance

    def _module(self, root: nn.Module) -> bool:
        waiting: list[nn.Module | None] = [root]
        while waiting:
            module = waiting.pop()
            self.marks.append(id(module))
            if module is None:
                continue
            if not _tells_as_usual(module):
                return False
            for tensors in (module._parameters, module._buffers):
                self.marks.append(len(tensors))
                if tensors and not self._named(tensors):
                    return False
            if module._non_persistent_buffers_set:
                self.marks.append(frozenset(module._non_persistent_buffers_set))
            self.marks.extend(module._modules)
            waiting.extend(module._modules.values())
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
            self.marks.append(len(group["params"]))
            self.marks.extend(map(id, group["params"]))
            self.marks.extend(group.get("param_names") or ())
            self.marks.append(bool(group.get("capturable")))
        for parameter, state in optimizer.state.items():
            self.marks.append(id(parameter))
            if type(state) is not dict or not self._named(state):
                return False
        return True

    def _named(self, values: dict[str, Any]) -> bool:
        marks = self.marks
        marks.extend(values)
        for value in values.values():
            local = value
            if type(value) not in _TENSORS:
                if type(value) in _CONSTANTS:
                    marks.append((type(value), value))
                    continue
                if not isinstance(value, DTensor):
                    return False
                marks.append(value._spec)
                local = value._local_tensor
            if local.layout is not torch.strided:
                return False
            marks.extend((
                id(value), local.data_ptr(), local.dtype, local.shape, local.stride(), local.get_device(),
                local.is_conj(), local.is_neg(), value.requires_grad,
            ))  # fmt: skip
            self.tensors.append(value)
        return True


def _tells_as_usual(module: nn.Module) -> bool:
    """Whether its state is its parameters and buffers, and nothing else."""
    kind = type(module)
    if kind not in _as_usual:
        usual = all(getattr(kind, name) is getattr(nn.Module, name) for name in _OWN_WAYS)
        _as_usual[kind] = usual and not issubclass(kind, FullyShardedDataParallel)
    # The hook of fully_shard puts shards in the place of gathered parameters; that is done already.
    hooked = module._state_dict_hooks or (module._state_dict_pre_hooks and not isinstance(module, FSDPModule))
    overridden = not module.__dict__.keys().isdisjoint(_OWN_WAYS)
    return _as_usual[kind] and not hooked and not overridden
