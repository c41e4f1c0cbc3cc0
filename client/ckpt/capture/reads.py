"""Small tensors of GPUs, such as those in trees. They are copied to the host, and the training thread does not wait.

`tensor.cpu()` and `tensor.item()` wait until the GPU has done everything that was queued: a step or more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckpt.device import DEVICES, Mark, has_device, poll
from ckpt.lazily import torch, torch_loaded


class Number:
    """A number that lies on a GPU, as a tensor of one element."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class SmallReads:
    """The reads of one save. The training thread begins them; any thread finishes them."""

    def __init__(self) -> None:
        self._marks: list[Mark] = []
        self._sources: list[torch.Tensor] = []

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Host memory that has the elements of a tensor after `finish`. The tensor may change at once."""
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
        if not has_device(tensor):
            return plain.cpu()
        device = DEVICES[tensor.device.type](tensor.device)
        try:
            host = device.pinned(plain.nbytes)
        except RuntimeError:  # no memory can be pinned
            return plain.cpu()
        to = host.view(plain.dtype).view(plain.shape)
        device.copy([to], [plain], side=False)
        self._marks.append(device.mark(side=False))
        self._sources.append(plain)
        return to

    def finish(self, expired: Callable[[], bool] | None = None) -> bool:
        """Wait until all reads are complete. False if time has expired before."""
        if not all(poll(mark.done, expired) for mark in self._marks):
            return False
        self._marks, self._sources = [], []
        return True


def scaler_state(value: object, reads: SmallReads) -> dict[str, Any] | None:
    """The state_dict of a GradScaler whose scale is on a GPU, with that as `Number`. None for other objects."""
    if not torch_loaded():
        return None
    GradScaler = torch.amp.grad_scaler.GradScaler  # noqa: N806
    if not isinstance(value, GradScaler) or type(value).state_dict is not GradScaler.state_dict:
        return None
    if not value.is_enabled() or value._scale is None or value._growth_tracker is None or not has_device(value._scale):
        return None
    scale, tracker = value._get_scale_async(), value._growth_tracker
    assert scale is not None
    return {
        "scale": Number(reads.read(scale)),
        "growth_factor": value.get_growth_factor(),
        "backoff_factor": value.get_backoff_factor(),
        "growth_interval": value.get_growth_interval(),
        "_growth_tracker": Number(reads.read(tracker)),
    }
