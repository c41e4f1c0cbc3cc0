"""torch.save, fsync; torch.load, whole or mapped."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from bench.measuring import sync_folder
from bench.peers.peer import Peer, copy_optimizer, give_back
from bench.state import State


class TorchSave(Peer):
    """One file."""

    distribution = "torch"

    def save(self, state: State, folder: Path) -> None:
        """Written through the page cache, as torch does."""
        folder.mkdir(parents=True)
        with (folder / "state.pt").open("wb") as file:
            torch.save(state.tree(), file)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(folder)
        sync_folder(folder.parent)

    def load(self, folder: Path, state: State) -> None:
        """Read whole; the optimizer takes the loaded tensors over."""
        give_back(torch.load(folder / "state.pt", weights_only=True), state)


class TorchMmap(TorchSave):
    """The same file, mapped and copied from the page cache: tensors that are only mapped are not loaded yet."""

    def load(self, folder: Path, state: State) -> None:
        """Copied once."""
        tree = torch.load(folder / "state.pt", weights_only=True, mmap=True)
        state.model.load_state_dict(tree["model"])
        if state.optim is not None:
            copy_optimizer(tree["optim"], state.optim)
