"""The leaves of a state: live tensors by name, and what is known of parameters. No collective; copies nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from msgspec import field
from msgspec.structs import replace
from torch import nn

from ckpt.capture.leaves import Change
from ckpt.capture.parts import FlatRange, TensorPart, inner_tensors, part_of
from ckptstore.values import Value

OptimizerState = dict[str, Any]
"""The state that an optimizer keeps for one parameter."""


class Pack(NamedTuple):
    """A flat parameter of FSDP1 (use_orig_params=False) or DeepSpeed, which is all that optimizers know of those in
    it."""

    parameter: torch.Tensor
    local: torch.Tensor
    """This rank's shard of it: one dimension."""
    views: Mapping[str, torch.Tensor]
    """The part of the local shard that belongs to each parameter in it, by canonical name."""

    def take(self, view: torch.Tensor, state: OptimizerState) -> OptimizerState:
        """One view's part of the flat parameter's state; state that is not flat goes to every view."""
        flat = self.local.shape
        return {
            key: self._part(view, value) if isinstance(value, torch.Tensor) and value.shape == flat else value
            for key, value in state.items()
        }

    def join(self, states: Iterable[OptimizerState]) -> OptimizerState:
        """The flat parameter's state, joined from the states of its views, in their order."""
        joined: OptimizerState = {}
        for view, state in zip(self.views.values(), states, strict=True):
            for key, value in state.items():
                if not isinstance(value, torch.Tensor) or value.shape != view.shape:
                    joined.setdefault(key, value)
                    continue
                flat = joined.setdefault(key, torch.zeros_like(self.local, dtype=value.dtype))
                self._part(view, flat).copy_(value)
        return joined

    def _part(self, view: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        at = view.storage_offset() - self.local.storage_offset()
        return whole[at : at + view.numel()]


class Leaf(Value, eq=False, gc=False):
    """A value of a module under its canonical name, or a parameter under the name that its optimizer state has."""

    item: str
    name: str
    value: Any
    """The live tensor; modules also have values of other types, as extra state."""
    unit: str
    """The unit of ownership that it belongs to, with the state that an optimizer keeps for it."""
    change: Change = Change.ANY_TIME
    layout: FlatRange | None = None
    """The parts that FSDP1 keeps of it here, and of its optimizer state; set by `Parameters.leaf`."""
    module: nn.Module | None = None
    """The one whose `state_dict` has the value."""
    raw: str = ""
    """Its name in that."""

    @property
    def path(self) -> str:
        """The name of its entry, if it is a module's; for messages."""
        return f"{self.item}/{self.name}"

    @property
    def part(self) -> TensorPart:
        """The part of the global tensor that this process holds. Raises UnsupportedObject, as `part_of` does."""
        return self.part_of(self.path, self.value)

    def part_of(self, path: str, tensor: torch.Tensor) -> TensorPart:
        """The same of a tensor that belongs to this one: a gradient, optimizer state."""
        cut = None if self.layout is None else self.layout.part(tensor)
        return cut or part_of(path, tensor)

    def inner(self) -> list[Leaf] | None:
        """The tensors that a wrapper consists of; `raw` is the attribute. None for all other values."""
        inner = inner_tensors(self.path, self.value) if isinstance(self.value, torch.Tensor) else None
        if inner is None:
            return None
        return [replace(self, name=f"{self.name}/{raw}", value=one, layout=None, raw=raw) for raw, one in inner.items()]


class Parameters(Value):
    """The parameters of all modules. Valid as long as the modules stay as they are."""

    by_name: dict[str, dict[str, Leaf]] = {}
    """By item and canonical name; a shared one of a module under its first name."""
    leaves: dict[int, Leaf] = {}
    """By id; the name is the one under which optimizer state is stored."""
    packs: dict[int, Pack] = {}
    """By id of the flat parameter, and of each view."""
    layouts: dict[int, FlatRange] = {}
    """The part that this rank holds of each parameter that is flattened, by id."""
    parts: dict[int, torch.Tensor] = {}
    """By id: this rank's part of the master of a parameter, which is saved in its place."""
    values: dict[str, list[Leaf]] = {}
    """All values of the modules, by item, as far as they have been looked for."""
    metadata: dict[str, dict[str, Any]] = field(default_factory=lambda: defaultdict(dict))
    """The format that `state_dict` names for modules not of version 1, by item and canonical prefix."""

    def leaf(self, item: str, name: str, value: Any, unit: str, **fields: Any) -> Leaf:
        """A leaf with the layout that this process knows of its value. Arguments: see Leaf."""
        return Leaf(item, name, value, unit, layout=self.layouts.get(id(value)), **fields)
