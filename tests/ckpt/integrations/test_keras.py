"""`fit` of Keras on torch. JAX and TensorFlow, in an environment of their own: tests/arrays/test_keras.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.ckpt.integrations.proof import Integration, operators_can_use, private_names_exist

ENVIRONMENT = ("KERAS_BACKEND=torch", "KERAS_HOME=/dev/null/keras")  # else Keras writes its settings to the home folder
KERAS = Integration(
    "tests.arrays.train_keras",
    (*ENVIRONMENT, "keras", "tests.arrays.train_keras", "tests.ckpt.integrations.pins", "torch._dynamo"),
)


@pytest.mark.parametrize("data", ["arrays", "batches", "loader"])
def test_a_run_killed_in_mid_epoch_resumes_exactly(tmp_path: Path, data: str) -> None:
    KERAS.resumes_exactly(tmp_path, "r", 18, data, resumed_at=17)
    if data == "arrays":
        own = {name: torch.from_numpy(value) for name, value in np.load(tmp_path / "r.npz").items()}
        torch.save(own, tmp_path / "own.pt")
        operators_can_use(tmp_path, "r", tmp_path / "own.pt", "weights/")


def test_names_that_are_not_public() -> None:
    private_names_exist("keras", KERAS)
