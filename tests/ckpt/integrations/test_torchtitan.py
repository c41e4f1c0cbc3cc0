from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ckpt.integrations.proof import Integration, operators_can_use, private_names_exist
from tests.support.command_line import invoke

TORCHTITAN = Integration(
    "tests.ckpt.integrations.train_torchtitan",
    (
        "torchtitan.components.checkpointer", "torchtitan.components.dataloader", "torchtitan.components.optimizer",
        "ckpt.integrations.torchtitan", "tests.ckpt.integrations.proof", "torch._dynamo",
    ),
)  # fmt: skip


def test_a_run_killed_in_mid_epoch_resumes_exactly(tmp_path: Path) -> None:
    TORCHTITAN.resumes_exactly(tmp_path, "llama", 10, resumed_at=9)
    operators_can_use(tmp_path, "llama", tmp_path / "llama-0.pt")


def test_two_ranks_with_fully_shard(tmp_path: Path) -> None:
    TORCHTITAN.resumes_exactly(tmp_path, "llama", 10, resumed_at=9, ranks=2)
    operators_can_use(tmp_path, "llama", tmp_path / "llama-0.pt")


def test_the_newest_are_kept(tmp_path: Path) -> None:
    TORCHTITAN.outputs(tmp_path, "llama", 0, "keep=2", "wait")
    assert [one["step"] for one in invoke("ls", "llama", "--store", tmp_path, "-o", "json").json] == [20, 18]


def test_names_that_are_not_public() -> None:
    private_names_exist("torchtitan", TORCHTITAN)


@pytest.mark.parametrize("name", ["last_save_in_hf", "initial_load_in_hf"])
def test_what_the_manager_does_not_do_is_refused(name: str) -> None:
    from ckpt.integrations.torchtitan import CkptdManager
    from ckptstore.errors import InvalidRequest

    options: dict[str, Any] = {name: True}
    with pytest.raises(InvalidRequest, match=name):
        CkptdManager.Config(**options)
