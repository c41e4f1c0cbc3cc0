"""safetensors: save_file, load_file, of weights and moments in one flat file."""

from __future__ import annotations

import os
from pathlib import Path

import safetensors.torch
import torch

from bench.measuring import sync_folder
from bench.peers.peer import Peer
from bench.state import State

FILE = "state.safetensors"


class Safetensors(Peer):
    """A flat file of tensors, without other state of an optimizer."""

    distribution = "safetensors"
    restores_optimizer = False

    def save(self, state: State, folder: Path) -> None:
        """Written through the page cache, as the library does; we sync."""
        folder.mkdir(parents=True)
        safetensors.torch.save_file(state.tensors(), folder / FILE)
        file = os.open(folder / FILE, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)
        sync_folder(folder)
        sync_folder(folder.parent)

    @torch.no_grad()
    def load(self, folder: Path, state: State) -> None:
        """Mapped, and copied into the live tensors."""
        loaded = safetensors.torch.load_file(folder / FILE)
        for name, tensor in state.tensors().items():
            tensor.copy_(loaded[name])
