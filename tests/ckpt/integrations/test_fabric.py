"""Lightning Fabric needs no integration: what it sets up is saved as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ckpt.integrations.proof import Integration, operators_can_use

FABRIC = Integration(
    "tests.ckpt.integrations.train_fabric",
    ("lightning.fabric", "ckpt.default", "tests.ckpt.integrations.proof", "torch._dynamo"),
)


@pytest.mark.parametrize(("ranks", "options"), [(1, ()), (2, ()), (2, ("fsdp",))])
def test_a_run_killed_in_mid_epoch_resumes_exactly(tmp_path: Path, ranks: int, options: tuple[str, ...]) -> None:
    FABRIC.resumes_exactly(
        tmp_path, "gpt", 8 if ranks > 1 else 18, *options, resumed_at=8 if ranks > 1 else 16, ranks=ranks
    )
    operators_can_use(tmp_path, "gpt", tmp_path / "gpt-0.pt")
