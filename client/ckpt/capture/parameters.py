"""What is known of the live parameters: names, units of ownership, and what FSDP1 keeps of them. No collective."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ckpt.capture.parts import Flat

OptimizerState = dict[str, Any]
"""What an optimizer keeps for one parameter."""


@dataclass(frozen=True, slots=True)
class Pack:
    """A flat parameter of FSDP1 (use_orig_params=False), which is all that optimizers know of those in it."""

    parameter: torch.Tensor
    local: torch.Tensor
    """This rank's shard of it: one dimension."""
    views: Mapping[str, torch.Tensor]
    """The part of the local shard that belongs to each parameter in it, by canonical name."""

    def take(self, view: torch.Tensor, state: OptimizerState) -> OptimizerState:
        """One view's part of the flat parameter's state; state that is not flat goes to every view."""
        return {key: self._part(view, value) if self._is_flat(value) else value for key, value in state.items()}

    def join(self, states: Mapping[str, OptimizerState]) -> OptimizerState:
        """The flat parameter's state, joined from the state of the parameters in it."""
        joined: OptimizerState = {}
        for name, view in self.views.items():
            for key, value in states.get(name, {}).items():
                if not isinstance(value, torch.Tensor) or value.dim() != 1 or value.shape != view.shape:
                    joined.setdefault(key, value)
                    continue
                flat = joined.setdefault(key, torch.zeros_like(self.local, dtype=value.dtype))
                self._part(view, flat).copy_(value)
        return joined

    def _is_flat(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.shape == self.local.shape

    def _part(self, view: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
        at = view.storage_offset() - self.local.storage_offset()
        return flat[at : at + view.numel()]


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters of all modules, by id. Valid as long as the modules stay as they are."""

    names: dict[int, str] = field(default_factory=dict)
    """The names under which optimizer state is stored."""
    units: dict[int, str] = field(default_factory=dict)
    """The ownership unit of each parameter: item/name."""
    flats: dict[int, Flat] = field(default_factory=dict)
    """The range of each flattened parameter that FSDP1 keeps on this rank."""
    packs: dict[int, Pack] = field(default_factory=dict)
    """By id of the flat parameter, and of each view."""

    def known_as(self, parameter: torch.Tensor, fallback: str) -> dict[str, torch.Tensor]:
        """The parameters, by name, that a parameter of an optimizer stands for: one, but for a flat one."""
        pack = self.packs.get(id(parameter))
        live = [parameter] if pack is None else list(pack.views.values())
        return {self.names.get(id(one), fallback): one for one in live}
