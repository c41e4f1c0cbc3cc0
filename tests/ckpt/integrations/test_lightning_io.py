"""Lightning's own ModelCheckpoint through a CheckpointIO: on rank 0 alone, with names, and with its paths."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.ckpt.integrations.proof import operators_can_use
from tests.ckpt.integrations.test_lightning import LIGHTNING
from tests.support.command_line import invoke
from tests.support.forking import run


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_lightning_saves_is_loaded_and_removed_by_its_paths(tmp_path: Path, ranks: int) -> None:
    """Saves at steps 4, 8 and 12, of which two stay; a resume by `last`; and a save at the end, step 14."""
    lines = LIGHTNING.outputs(tmp_path, "gpt", 0, "io", ranks=ranks)
    again = LIGHTNING.outputs(tmp_path, "gpt", 0, "io", "again", ranks=ranks)
    assert ([line.split()[0] for line in again[0]], len(lines[0])) == (["12", "13", "weights"], 13)
    assert [one["step"] for one in invoke("ls", "gpt", "--store", tmp_path, "-o", "json").json] == [14, 12, 8]
    last = torch.load(tmp_path / "gpt-0.pt", weights_only=True)
    operators_can_use(tmp_path, "gpt", tmp_path / "gpt-0.pt", prefix="state_dict/")
    loaded = torch.load(tmp_path / "loaded.pt", weights_only=True)
    assert loaded["global_step"] == 14
    assert all(torch.equal(loaded["state_dict"][name], tensor) for name, tensor in last.items())
    assert set(loaded["optimizer_states"][0]["state"]) == set(range(4))
    assert (tmp_path / "foreign").read_text() == "a file of Lightning's own"


def test_fits_of_one_process_continue_each_other_or_start_over(tmp_path: Path) -> None:
    """With the callback, and with the CheckpointIO and its paths. Entries: step, generation, state."""
    code, output, errors = run(LIGHTNING.imports, "tests.ckpt.integrations.fits_lightning", [str(tmp_path)])
    assert code == 0, errors
    found = json.loads(output)
    assert found["continued"] == [[step, 1, "committed"] for step in (2, 4, 6, 8)]
    assert [one for one in found["resumed"] if one[2] == "committed"] == [
        [2, 1, "committed"], [4, 1, "committed"], [6, 2, "committed"]
    ]  # fmt: skip
    assert [one for one in found["other"] if one[1] == 3] == [[2, 3, "committed"]]
    assert [6, 2, "committed"] in found["other"], "a lower step abandons nothing"
    assert found["two callbacks"].startswith("the Trainer has several CkptdCheckpoint callbacks")
    assert found["right"] == dict.fromkeys(("one", "one, last", "two", "two, last", "whole"), True)
    assert found["one"] == [[2, 1, "committed"], [4, 1, "committed"]]
    assert {one[2] for one in found["two"]} == {"committed"}
    assert [one[0] for one in found["two"] if one[1] == 2] == [2, 4]
    assert [one for one in found["went on"] if one[1] == 2 and one[2] == "committed"] == [
        [step, 2, "committed"] for step in (2, 4, 6)
    ]
    assert (found["paths"], found["removed"]) == ([2, 4], [4])
