"""Lightning: killed runs resume exactly under its strategies, and operators can use what was saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckpt import Checkpointer
from tests.ckpt.integrations.proof import Integration, operators_can_use, private_names_exist
from tests.support.command_line import invoke

LIGHTNING = Integration(
    "tests.ckpt.integrations.train_lightning",
    ("lightning.pytorch", "ckpt.integrations.lightning", "tests.ckpt.integrations.proof", "torch._dynamo"),
)


def test_a_run_killed_in_mid_epoch_resumes_exactly(tmp_path: Path) -> None:
    LIGHTNING.resumes_exactly(tmp_path, "gpt", 17, "every=4", resumed_at=16)
    operators_can_use(tmp_path, "gpt", tmp_path / "gpt-0.pt")


@pytest.mark.parametrize("strategy", ["ddp", "fully_shard"])
def test_two_ranks(tmp_path: Path, strategy: str) -> None:
    LIGHTNING.resumes_exactly(tmp_path, "gpt", 8, "every=3", strategy, resumed_at=6, ranks=2)
    if strategy != "ddp":  # whose checkpoint is that of one process
        operators_can_use(tmp_path, "gpt", tmp_path / "gpt-0.pt")


def test_several_loaders_one_of_which_has_a_state_of_its_own(tmp_path: Path) -> None:
    """Resumable loaders draw the seeds of an epoch earlier, so several of them have an order of their own."""
    whole = LIGHTNING.outputs(tmp_path, "whole", 30, "every=4", "several")[0]
    assert LIGHTNING.outputs(tmp_path, "gpt", 17, "every=4", "several")[0] == whole[:17]
    assert LIGHTNING.outputs(tmp_path, "gpt", 0, "every=4", "several")[0][:-1] == whole[16:]


def test_a_save_that_is_due_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    LIGHTNING.resumes_exactly(tmp_path, "gpt", 12, "every=10", resumed_at=10)


@pytest.mark.parametrize(("kill_at", "resumed_at"), [(8, 5), (12, 10)])
def test_saves_after_validations_of_which_the_best_are_kept(tmp_path: Path, kill_at: int, resumed_at: int) -> None:
    LIGHTNING.resumes_exactly(tmp_path, "gpt", kill_at, "val", resumed_at=resumed_at)
    listed = invoke("ls", "gpt", "--store", tmp_path, "-o", "json").json
    best = sorted(listed, key=lambda one: one["metrics"]["val"])[:2]
    newest = max(listed, key=lambda one: one["step"])
    assert {one["id"] for one in listed} == {one["id"] for one in (*best, newest)}
    validated = torch.load(tmp_path / "best.pt", weights_only=True)
    assert validated.pop("path") == f"ckptd://{best[0]['id']}"
    saved = Checkpointer(str(tmp_path), run="gpt").load(best[0]["id"], "model/*")
    assert saved.keys() == {f"model/{name}" for name in validated}
    assert all(torch.equal(saved[f"model/{name}"], tensor) for name, tensor in validated.items())


def test_a_run_killed_within_an_accumulation_window(tmp_path: Path) -> None:
    """Ten batches per epoch in windows of three; validations are after batches 5 and 10."""
    LIGHTNING.resumes_exactly(tmp_path, "gpt", 7, "val", "windows", resumed_at=5)


@pytest.mark.parametrize(("when", "steps"), [("every=2", [12, 10, 8, 6, 4, 2]), ("auto", [12])])
def test_saves_fall_between_accumulation_windows(tmp_path: Path, when: str, steps: list[int]) -> None:
    LIGHTNING.outputs(tmp_path, "gpt", 0, when, "windows")
    listed = invoke("ls", "gpt", "--store", tmp_path, "-o", "json").json
    assert [one["step"] for one in listed][: len(steps)] == steps
    assert listed[-1]["step"] > 0


def test_saves_between_validations_do_not_have_their_metrics(tmp_path: Path) -> None:
    LIGHTNING.outputs(tmp_path, "gpt", 0, "val", "every=2", "top=-1")
    listed = invoke("ls", "gpt", "--store", tmp_path, "-o", "json").json
    assert {one["step"] for one in listed if "val" in one["metrics"]} == {5, 10, 15, 20, 25, 30}
    assert listed[0]["step"] == 30


def test_a_run_that_is_terminated_saves_and_continues_there(tmp_path: Path) -> None:
    plain = LIGHTNING.plain()[0]
    assert LIGHTNING.outputs(tmp_path, "gpt", 0, "term")[0][-1].startswith("7 ")
    assert LIGHTNING.outputs(tmp_path, "gpt", 0)[0] == plain[8:]


def test_names_that_are_not_public(tmp_path: Path) -> None:
    private_names_exist("lightning", LIGHTNING)
