from __future__ import annotations

from pathlib import Path

import pytest

from tests.ckpt.integrations.proof import Integration, operators_can_use, private_names_exist

ACCELERATE = Integration(
    "tests.ckpt.integrations.train_accelerate",
    ("accelerate", "ckpt.integrations.accelerate", "tests.ckpt.integrations.proof", "torch._dynamo"),
)


def test_a_run_killed_in_mid_epoch_resumes_exactly(tmp_path: Path) -> None:
    ACCELERATE.resumes_exactly(tmp_path, "gpt", 18, resumed_at=16)
    operators_can_use(tmp_path, "gpt", tmp_path / "gpt-0.pt")


def test_two_ranks_killed_within_an_accumulation_window(tmp_path: Path) -> None:
    ACCELERATE.resumes_exactly(tmp_path, "gpt", 9, resumed_at=8, ranks=2)


def test_a_save_at_the_last_batch_of_an_epoch(tmp_path: Path) -> None:
    ACCELERATE.resumes_exactly(tmp_path, "gpt", 21, resumed_at=20)


def test_a_save_after_a_loop_was_left(tmp_path: Path) -> None:
    """Killed in the second epoch, whose first step is 7."""
    ACCELERATE.resumes_exactly(tmp_path, "gpt", 9, "break", resumed_at=7)


def test_names_that_are_not_public() -> None:
    private_names_exist("accelerate", ACCELERATE)


@pytest.mark.parametrize("ranks", [1, 2])
def test_fsdp2(tmp_path: Path, ranks: int) -> None:
    """Two ranks have five batches in an epoch, and save within an accumulation window."""
    ACCELERATE.resumes_exactly(tmp_path, "gpt", 9, "fsdp", "sync", resumed_at=8, ranks=ranks)
    operators_can_use(tmp_path, "gpt", tmp_path / "gpt-0.pt")


def test_fsdp2_refuses_gradients_that_are_not_reduced(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="UnsupportedObject: fully_shard holds gradients that are not reduced"):
        ACCELERATE.outputs(tmp_path, "gpt", 9, "fsdp", ranks=2)
