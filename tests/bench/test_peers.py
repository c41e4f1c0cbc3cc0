"""Peers give back what they saved, or are listed with what is wrong with them."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from bench.ours import Ours
from bench.peers import SAVING, open_codecs, open_peers
from bench.peers.peer import Peer
from bench.state import SMALL, State, trained

INSTALLED = ("torch.save", "torch.load(mmap)", "dcp", "dcp-thread", "safetensors")
"""Where the project is checked; others are used if they are there."""


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> State:
    monkeypatch.setenv(SMALL, "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return trained("fp32", 1_000_000)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_was_saved_comes_back_bit_by_bit(state: State, tmp_path: Path) -> None:
    want = state.digest()
    with ExitStack() as stack:
        peers, problems = open_peers(INSTALLED, stack)
        assert problems == {}
        contestants: dict[str, Peer] = {"ckptd": stack.enter_context(Ours(tmp_path)), **peers}
        for name, peer in contestants.items():
            folder = tmp_path / name
            peer.save(state, folder)
            assert 0.5 < peer.stored_bytes(folder) / state.num_bytes < 1.2
            state.forget()
            peer.load(folder, state)
            assert state.digest() == want, name
            peer.discard(folder)
            assert not folder.exists()


def test_a_peer_that_is_missing_is_listed_and_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SAVING, "gone", "bench.peers.gone:Gone")
    with ExitStack() as stack:
        peers, problems = open_peers(["gone", "safetensors"], stack)
    assert list(peers) == ["safetensors"]
    assert problems == {"gone": "ModuleNotFoundError: No module named 'bench.peers.gone'"}


def test_codecs_that_are_there_are_lossless(state: State) -> None:
    raw = memoryview(state.model.head.weight.detach().numpy().reshape(-1).view("uint8").data)
    codecs, problems = open_codecs()
    assert codecs.keys() | problems.keys() == {"zipnn", "openzl", "blosc2"}
    for name, codec in codecs.items():
        assert bytes(codec.decode(codec.encode(raw, "float32"), "float32")) == bytes(raw), name
