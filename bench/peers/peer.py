"""The interface of every peer."""

from __future__ import annotations

import importlib.metadata
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Protocol

import torch

from bench.measuring import tree_bytes
from bench.state import State


class Peer(ABC):
    """One library that saves and loads states. For one thread; any thread may use the result of start_save."""

    distribution: ClassVar[str]
    """As the package index calls it."""
    restores_optimizer: ClassVar[bool] = True
    """Whether its file records optimizer state: otherwise it has only named tensors."""
    saves: ClassVar[bool] = True
    loads: ClassVar[bool] = True
    asynchronous: ClassVar[bool] = False
    """Whether start_save returns before the state is durable."""

    @property
    def version(self) -> str:
        """Version of the distribution."""
        return importlib.metadata.version(self.distribution)

    @abstractmethod
    def save(self, state: State, folder: Path) -> None:
        """Into a folder that does not exist yet; durable on return: files and folders are fsynced."""

    def start_save(self, state: State, folder: Path) -> Callable[[], None]:
        """As save, but return as soon as training may continue; call the result to wait until it is durable."""
        raise NotImplementedError(f"{type(self).__name__} has no asynchronous save")

    def before_step(self) -> AbstractContextManager[object]:
        """To be held around each optimizer step, where a library wants that."""
        return nullcontext()

    def load(self, folder: Path, state: State) -> None:
        """Give the live tensors of a state the saved values, all of them in memory on return."""
        raise NotImplementedError(f"{type(self).__name__} does not load")

    def discard(self, folder: Path) -> None:
        """Delete the save there."""
        shutil.rmtree(folder)

    def stored_bytes(self, folder: Path) -> int:
        """Size of a save on the disk."""
        return tree_bytes(folder)

    def close(self) -> None:  # noqa: B027
        """End threads and processes."""

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Codec(Protocol):
    """One library that makes bytes of tensors smaller, with one thread."""

    def encode(self, raw: memoryview | bytearray, dtype: str) -> bytes:
        """dtype as torch spells it: float32, bfloat16, float16. A bytearray may be changed in place."""
        ...

    def decode(self, stored: bytes, dtype: str) -> bytes | bytearray | memoryview:
        """The bytes that were encoded."""
        ...


def give_back(tree: dict[str, Any], state: State) -> None:
    """Load state dicts as users do. Masters are copied: an optimizer would cast them to the dtype of the weights."""
    state.model.load_state_dict(tree["model"])
    if state.kind == "fp32" and state.optim is not None:
        state.optim.load_state_dict(tree["optim"])
    elif state.optim is not None:
        copy_optimizer(tree["optim"], state.optim)


@torch.no_grad()
def copy_optimizer(loaded: dict[str, Any], optim: torch.optim.Optimizer) -> None:
    """Into the live tensors, and the options."""
    for group, options in zip(optim.param_groups, loaded["param_groups"], strict=True):
        group.update((key, value) for key, value in options.items() if key != "params")
    live = optim.state_dict()["state"]
    for number, moments in loaded["state"].items():
        for key, tensor in moments.items():
            live[number][key].copy_(tensor)
