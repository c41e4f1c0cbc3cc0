"""A folder that Megatron wrote is imported whole: tensors, objects, and its arguments from common.pt."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from tests.support.command_line import succeed


def test_a_folder_of_torch_dist(tmp_path: Path) -> None:
    folder, store = tmp_path / "iter_0000007", tmp_path / "store"
    subprocess.run([sys.executable, "-W", "ignore", "-m", "tests.frameworks.save_megatron", folder], check=True)
    assert {".metadata", "common.pt", "metadata.json"} <= {path.name for path in folder.iterdir()}
    store.mkdir()
    body = succeed("import", folder, "run@7", "--store", store, "-o", "json").json
    assert (body["format"], body["items"], body["notes"]) == ("dcp", ["common", "model"], [])
    succeed("export", "run@7", "--to", tmp_path / "out.pt", "--store", store)
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert torch.equal(found["model"]["decoder.weight"], torch.arange(12.0).reshape(3, 4))
    assert found["model"]["decoder._extra_state/shard_0_1"] == [{"scale": 2.0}]
    args = {"lr": 0.1, "params_dtype": torch.bfloat16, "data_path": ["a", "b"]}
    assert found["common"] == {
        "args": args, "checkpoint_version": 3.0, "iteration": 7, "opt_param_scheduler": {"num_steps": 7},
    }  # fmt: skip
