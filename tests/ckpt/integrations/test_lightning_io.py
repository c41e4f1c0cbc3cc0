"""Lightning's own ModelCheckpoint through a CheckpointIO: on rank 0 alone, with names, and with its paths."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.ckpt.integrations.proof import operators_can_use
from tests.ckpt.integrations.test_lightning import LIGHTNING
from tests.support.command_line import invoke


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_lightning_saves_is_loaded_and_removed_by_its_paths(tmp_path: Path, ranks: int) -> None:
    """Saves at steps 4, 8 and 12, of which two stay; a resume by `last`; and a save at the end, step 14."""
    lines = LIGHTNING.outputs(tmp_path, "gpt", 0, "io", ranks=ranks)
    again = LIGHTNING.outputs(tmp_path, "gpt", 0, "io", "again", ranks=ranks)
    assert [line.split()[0] for line in again[0]] == ["12", "13", "weights"]
    assert len(lines[0]) == 13
    listed = invoke("ls", "gpt", "--store", tmp_path, "-o", "json").json
    assert [one["step"] for one in listed] == [14, 12, 8]
    last = torch.load(tmp_path / "gpt-0.pt", weights_only=True)
    operators_can_use(tmp_path, "gpt", tmp_path / "gpt-0.pt", prefix="state_dict/")
    loaded = torch.load(tmp_path / "loaded.pt", weights_only=True)
    assert loaded["global_step"] == 14
    assert all(torch.equal(loaded["state_dict"][name], tensor) for name, tensor in last.items())
    assert set(loaded["optimizer_states"][0]["state"]) == set(range(4))
    assert (tmp_path / "foreign").read_text() == "a file of Lightning's own"
