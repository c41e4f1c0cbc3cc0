"""Run:ai's model streamer: reads safetensors files with many threads."""

from __future__ import annotations

from pathlib import Path

import torch
from runai_model_streamer import SafetensorsStreamer

from bench.peers.safetensors import FILE, Safetensors
from bench.state import State


class RunaiModelStreamer(Safetensors):
    """Loads only; the file is written by safetensors."""

    distribution = "runai-model-streamer"

    @torch.no_grad()
    def load(self, folder: Path, state: State) -> None:
        """Streamed into its buffer, and copied into the live tensors."""
        live = state.tensors()
        with SafetensorsStreamer() as streamer:
            streamer.stream_file(str(folder / FILE))
            for name, tensor in streamer.get_tensors():
                live[name].copy_(tensor)
