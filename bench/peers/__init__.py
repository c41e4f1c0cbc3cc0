"""The peers: one file for each, behind the same few calls, with its best settings for a CPU, and equally durable.

The libraries are imported when a peer is made, never before: one that is missing or broken is listed as such.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from contextlib import ExitStack

from bench.measuring import problem
from bench.peers.peer import Codec, Peer

SAVING = {
    "torch.save": "bench.peers.torch_save:TorchSave",
    "torch.load(mmap)": "bench.peers.torch_save:TorchMmap",
    "dcp": "bench.peers.dcp:Dcp",
    "dcp-thread": "bench.peers.dcp:DcpThread",
    "dcp-process": "bench.peers.dcp:DcpProcess",
    "torch_checkpointing": "bench.peers.torch_checkpointing:TorchCheckpointing",
    "torchsnapshot": "bench.peers.torchsnapshot:TorchSnapshot",
    "moonclip": "bench.peers.moonclip:Moonclip",
    "safetensors": "bench.peers.safetensors:Safetensors",
    "runai-model-streamer": "bench.peers.runai:RunaiModelStreamer",
}
CODECS = {
    "zipnn": "bench.peers.zipnn:Zipnn",
    "openzl": "bench.peers.openzl:Openzl",
    "blosc2": "bench.peers.blosc2:Blosc2",
}


def open_peers(names: Iterable[str], stack: ExitStack) -> tuple[dict[str, Peer], dict[str, str]]:
    """Those that can be had, closed by the stack; and why the others cannot."""
    peers: dict[str, Peer] = {}
    problems: dict[str, str] = {}
    for name in names:
        try:
            peers[name] = stack.enter_context(_make(SAVING[name]))
        except Exception as error:  # an import may raise anything
            problems[name] = problem(error)
    return peers, problems


def open_codecs(names: Iterable[str] = CODECS) -> tuple[dict[str, Codec], dict[str, str]]:
    """Those that can be had, and why the others cannot."""
    codecs: dict[str, Codec] = {}
    problems: dict[str, str] = {}
    for name in names:
        try:
            codecs[name] = _make(CODECS[name])
        except Exception as error:  # an import may raise anything
            problems[name] = problem(error)
    return codecs, problems


def _make(path: str):  # type: ignore[no-untyped-def]
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)()
