from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ckpt import Checkpointer
from tests.ckpt.integrations.proof import Integration, operators_can_use, private_names_exist
from tests.support.command_line import invoke, succeed

TRANSFORMERS = Integration(
    "tests.ckpt.integrations.train_transformers",
    ("transformers.trainer", "ckpt.integrations.transformers", "tests.ckpt.integrations.proof", "torch._dynamo"),
)


def test_a_run_killed_in_mid_epoch_resumes_exactly(tmp_path: Path) -> None:
    TRANSFORMERS.resumes_exactly(tmp_path, "gpt", 18, resumed_at=16)
    operators_can_use(tmp_path, "gpt", tmp_path / "gpt-0.pt")
    hub = tmp_path / "hub"
    succeed("export", "gpt", "--to", hub, "--format", "huggingface", "--store", tmp_path)
    assert sorted(path.name for path in hub.iterdir()) == ["config.json", "model.safetensors"]
    assert json.loads((hub / "config.json").read_text())["model_type"] == "tiny"


def test_two_ranks(tmp_path: Path) -> None:
    TRANSFORMERS.resumes_exactly(tmp_path, "gpt", 10, resumed_at=8, ranks=2)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_fsdp2(tmp_path: Path, ranks: int) -> None:
    TRANSFORMERS.resumes_exactly(tmp_path, "gpt", 10, "fsdp", resumed_at=8, ranks=ranks)
    operators_can_use(tmp_path, "gpt", tmp_path / "gpt-0.pt")


@pytest.mark.slow
def test_fsdp2_with_the_best_model_at_the_end(tmp_path: Path) -> None:
    TRANSFORMERS.resumes_exactly(tmp_path, "gpt", 10, "fsdp", "val", resumed_at=8, ranks=2)


def test_saves_at_the_end_of_epochs(tmp_path: Path) -> None:
    TRANSFORMERS.resumes_exactly(tmp_path, "gpt", 13, "epoch", resumed_at=10)


def test_a_run_that_saved_the_weights_alone_goes_on_with_a_new_optimizer(tmp_path: Path) -> None:
    """As without this project; its first loss is that of the weights and the random state that were saved."""
    (before,) = TRANSFORMERS.outputs(tmp_path, "gpt", 18, "weights")
    (rest,) = TRANSFORMERS.outputs(tmp_path, "gpt", 0, "weights")
    assert (rest[0].split()[0], rest[0]) == ("16", before[16])
    assert rest[1] != before[17]


def test_the_best_model_is_kept_and_loaded_at_the_end(tmp_path: Path) -> None:
    TRANSFORMERS.resumes_exactly(tmp_path, "gpt", 14, "val", "limit=2", resumed_at=12)
    listed = invoke("ls", "gpt", "--store", tmp_path, "-o", "json").json
    with_metric = [one for one in listed if "eval_loss" in one["metrics"]]
    best = min(with_metric, key=lambda one: one["metrics"]["eval_loss"])
    assert {one["id"] for one in listed} == {best["id"], listed[0]["id"]}
    model = torch.load(tmp_path / "best.pt", weights_only=True)
    saved = Checkpointer(str(tmp_path), run="gpt").load(best["id"], "model/*")
    assert all(torch.equal(saved[f"model/{name}"], tensor) for name, tensor in model.items())


def test_the_best_model_is_loaded_by_a_run_that_was_at_its_end(tmp_path: Path) -> None:
    """With five sets for evaluation, of which the first one decides, and beside a checkpoint that is none of ours."""
    (tmp_path / "out" / "checkpoint-3").mkdir(parents=True)
    TRANSFORMERS.outputs(tmp_path, "gpt", 0, "val", "greater", "sets", "limit=1")
    (tmp_path / "best.pt").rename(tmp_path / "before.pt")
    assert TRANSFORMERS.outputs(tmp_path, "gpt", 0, "val", "greater", "sets", "limit=1") == [[]]
    before, after = (torch.load(tmp_path / name, weights_only=True) for name in ("before.pt", "best.pt"))
    newest = Checkpointer(str(tmp_path), run="gpt").load(None, "model/*")
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert not all(torch.equal(newest[f"model/{name}"], tensor) for name, tensor in before.items())
    assert [one.name for one in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-3"]
    # By a metric that no checkpoint has, the newest weights stay.
    assert TRANSFORMERS.outputs(tmp_path, "gpt", 0, "val", "greater", "limit=1") == [[]]
    after = torch.load(tmp_path / "best.pt", weights_only=True)
    assert all(torch.equal(newest[f"model/{name}"], tensor) for name, tensor in after.items())


def test_names_that_are_not_public() -> None:
    private_names_exist("transformers", TRANSFORMERS)
