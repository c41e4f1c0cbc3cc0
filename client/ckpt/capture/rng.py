"""The state of every random number generator a training step may draw from."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckpt.lazily import torch, torch_loaded


def rng_state() -> dict[str, Any]:
    """Python's, numpy's and torch's global generators, and those of all CUDA devices if CUDA is in use.

    A generator's state lies in host memory: reading it neither waits for a device nor makes a context on it.
    """
    state = host_rng_state()
    if torch_loaded() and torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        every = [generator.get_state() for generator in torch.cuda.default_generators]
        state |= {"cuda": every[torch.cuda.current_device()], "cuda_devices": every}
    return state


def host_rng_state() -> dict[str, Any]:
    """Python's, numpy's and, if it is loaded, torch's global generators on the CPU."""
    version, internal, gauss = random.getstate()
    state = {
        # 625 numbers, which as an array are written in a fraction of the time.
        "python": (version, np.array(internal, dtype=np.uint32), gauss),
        "numpy": np.random.get_state(legacy=False),
    }
    return {**state, "torch": torch.get_rng_state()} if torch_loaded() else state


def load_rng_state(state: dict[str, Any]) -> None:
    """Set the generators in the state, torch's if it is loaded.

    Do it last: whatever else a restore does may draw numbers.
    """
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal.tolist()), gauss))
    np.random.set_state(state["numpy"])
    if "torch" not in state or not torch_loaded():
        return
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.init()  # type: ignore[no-untyped-call]
        generators = torch.cuda.default_generators
        # Older versions kept the current device only. It may have another number now.
        for generator, saved in zip(generators, state.get("cuda_devices", ()), strict=False):
            generator.set_state(saved.cpu())
        generators[torch.cuda.current_device()].set_state(state["cuda"].cpu())


@dataclass
class RngOnce:
    """Random state that is put back once more, for several loaders: by the first that goes to its position."""

    _restore: Callable[[], None] | None

    def __call__(self, within_epoch: bool = True) -> None:
        """A loader begins, at a position within an epoch or not: then its draws count, and nothing is put back."""
        restore, self._restore = self._restore, None
        if restore is not None and within_epoch:
            restore()


def derive_rng_state(seed: int) -> None:
    """Seed them all from 64 bits. Do it last, like `load_rng_state`."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    if torch_loaded():
        torch.manual_seed(seed % (1 << 63))
