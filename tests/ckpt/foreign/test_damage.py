"""Bytes changed anywhere in a file: an error of ours, or an import that stays within the file's means."""

import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from safetensors.torch import save_file

from ckpt.foreign.importing import ForeignFormat, read_foreign
from ckptstore.errors import BadInput, Damaged

dcp: Any = torch.distributed.checkpoint  # it exports without saying so

STATE = {
    "model": {"w": torch.arange(12.0).reshape(4, 3), "v": torch.arange(12.0).reshape(4, 3).t()},
    "optim": {"state": {0: {"m": torch.ones(3)}}, "param_groups": [{"params": [0], "lr": 0.1}]},
    "text": "x",
}


def write(folder: Path, name: str) -> tuple[Path, Path, ForeignFormat]:
    """What is imported, the file of it that is changed, and its format."""
    if name == "a.pt":
        torch.save(STATE, folder / name)
        return folder / name, folder / name, ForeignFormat.TORCH
    if name == "a.safetensors":
        save_file({"a": torch.ones(3), "b": torch.zeros(2, dtype=torch.int8)}, folder / name)
        return folder / name, folder / name, ForeignFormat.SAFETENSORS
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(STATE, checkpoint_id=folder, no_dist=True)
    return folder, folder / name, ForeignFormat.DCP


def mutations(good: bytes, count: int) -> Iterator[bytes]:
    """Copies with a few bytes changed, taken out or put in; the same ones every time."""
    chance = random.Random(7)
    for _ in range(count):
        data = bytearray(good)
        for _ in range(chance.choice([1, 1, 1, 2, 5])):
            at, kind = chance.randrange(len(data)), chance.random()
            if kind < 0.6:
                data[at] = chance.randrange(256)
            elif kind < 0.8:
                del data[at : at + chance.randrange(1, 9)]
            else:
                data[at:at] = chance.randbytes(chance.randrange(1, 5))
        yield bytes(data)


@pytest.mark.filterwarnings("ignore")  # torch's, about what it reads
@pytest.mark.parametrize("name", ["a.pt", "a.safetensors", ".metadata", "__0_0.distcp"])
def test_any_damage_is_an_error_of_ours_or_harmless(tmp_path: Path, name: str) -> None:
    path, file, kind = write(tmp_path, name)
    refused = 0
    for data in mutations(file.read_bytes(), 200):
        file.write_bytes(data)
        try:
            foreign = read_foreign(path, kind, "model")
            assert foreign.raw_bytes <= sum(f.stat().st_size for f in tmp_path.iterdir())
            for part in foreign.parts:
                part.read(0, memoryview(bytearray(part.slice.bytes)))
        except (BadInput, Damaged):
            refused += 1
    assert refused > 20
