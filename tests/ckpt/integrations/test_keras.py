"""`fit` of Keras on torch. JAX and TensorFlow, in an environment of their own: tests/arrays/test_keras.py."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpt import Checkpointer
from ckptstore.errors import InvalidRequest, StateMismatch
from tests.ckpt.integrations.proof import Integration, operators_can_use, private_names_exist
from tests.support.waiting import present

ENVIRONMENT = ("KERAS_BACKEND=torch", "KERAS_HOME=/dev/null/keras")  # else Keras writes its settings to the home folder
os.environ |= dict(one.split("=") for one in ENVIRONMENT)

import keras  # noqa: E402 - it reads the environment

from ckpt.integrations.keras import Backup, restore, save_async  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of Keras's own tensors
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


X = np.arange(24, dtype=np.float32).reshape(12, 2) / 24
Y = X.sum(1, keepdims=True)


def model(units: int = 3, name: str = "first") -> Any:
    found = keras.Sequential(
        [keras.Input((2,)), keras.layers.Dense(units, name=name), keras.layers.Dense(1, name="last")]
    )
    found.compile(optimizer=keras.optimizers.Adam(1e-2), loss="mse")
    return found


def fit(store: Path, found: Any, epochs: int, size: int = 12, **options: Any) -> Any:
    backup = Backup(str(store), run="r", writer="thread", **options)
    return found.fit(X[:size], Y[:size], batch_size=4, epochs=epochs, verbose=0, callbacks=[backup]).history


def steps(store: Path) -> list[int]:
    with Checkpointer(str(store), run="r") as run:
        return sorted(one.step for one in run._source.checkpoints("r"))


def test_saves_each_epoch_and_trains_nothing_again(tmp_path: Path) -> None:
    first, again = model(), model()
    assert len(fit(tmp_path, first, 2)["loss"]) == 2
    assert steps(tmp_path) == [3, 6]
    assert fit(tmp_path, again, 2) == {}
    assert all(map(np.array_equal, first.get_weights(), again.get_weights()))
    assert len(fit(tmp_path, again, 3)["loss"]) == 1
    assert steps(tmp_path) == [3, 6, 9]


def test_what_does_not_fit_is_refused_before_anything_changes(tmp_path: Path) -> None:
    fit(tmp_path, model(), 1)
    for other, said in (
        (model(units=4), r"weights/first/kernel: \[2, 3\] in the checkpoint, \[2, 4\] here"),
        (model(name="other"), "weights/first/bias is on one side only"),
    ):
        before = other.get_weights()
        with pytest.raises(StateMismatch, match=said):
            fit(tmp_path, other, 2)
        assert all(map(np.array_equal, before, other.get_weights()))
    unbuilt = keras.Sequential([keras.layers.Dense(1)])
    unbuilt.compile(loss="mse")
    with (
        Checkpointer(str(tmp_path), run="r", writer="thread") as run,
        pytest.raises(InvalidRequest, match="the model is not built"),
    ):
        restore(unbuilt, checkpointer=run)


def test_data_that_end_too_early_are_refused(tmp_path: Path) -> None:
    backup = Backup(str(tmp_path), run="r", save_freq=2, writer="thread")
    with pytest.raises(ZeroDivisionError):
        model().fit(X, Y, batch_size=4, verbose=0, callbacks=[backup, failing(1)])
    backup._checkpointer.wait()
    with pytest.raises(StateMismatch, match="is at batch 2 of epoch 0, and the data end before it"):
        fit(tmp_path, model(), 1, size=4)


def test_metrics_of_several_numbers_are_none_of_the_checkpoint(tmp_path: Path) -> None:
    found = model()
    found.compile(optimizer="sgd", loss="mse", metrics=["mae", keras.metrics.F1Score()])
    assert {"loss", "mae", "f1_score"} <= fit(tmp_path, found, 1).keys()
    with Checkpointer(str(tmp_path), run="r") as run:
        assert run._source.latest("r").metrics.keys() == {"loss", "mae"}


class TwoOptimizers(keras.Model):
    """Each layer has an optimizer of its own, as the two networks of a GAN do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = keras.layers.Dense(3, name="first"), keras.layers.Dense(1, name="last")
        self.first_optimizer, self.last_optimizer = keras.optimizers.Adam(1e-2), keras.optimizers.Adam(1e-3)
        self(X)
        self.compile(loss="mse")

    def call(self, x: Any) -> Any:
        return self.last(self.first(x))

    def train_step(self, data: Any) -> dict[str, Any]:
        self.zero_grad()
        loss = (self(data[0]) - data[1]).square().mean()
        loss.backward()
        for optimizer, layer in ((self.first_optimizer, self.first), (self.last_optimizer, self.last)):
            with torch.no_grad():
                optimizer.apply([one.value.grad for one in layer.trainable_weights], layer.trainable_weights)
        return {"loss": loss}

    def build_optimizers(self) -> TwoOptimizers:
        """So that their variables exist before the first step."""
        self.first_optimizer.build(self.first.trainable_weights)
        self.last_optimizer.build(self.last.trainable_weights)
        return self


def test_optimizers_that_are_attributes_of_the_model(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="optimizer first_optimizer of the model is not built"):
        fit(tmp_path, TwoOptimizers(), 1)
    found, again = TwoOptimizers().build_optimizers(), TwoOptimizers().build_optimizers()
    fit(tmp_path, found, 1)
    assert fit(tmp_path, again, 1) == {}
    for one, other in ((found.first_optimizer, again.first_optimizer), (found.last_optimizer, again.last_optimizer)):
        assert int(other.iterations) == 3
        pairs = zip(one.variables, other.variables, strict=True)
        assert all(np.array_equal(a.numpy(), b.numpy()) for a, b in pairs)


def test_a_fit_that_failed_leaves_the_next_one_its_epochs(tmp_path: Path) -> None:
    found = model()
    fit(tmp_path, found, 2)
    stop = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        found.fit(X, Y, epochs=3, verbose=0, callbacks=[Backup(str(tmp_path), run="r", writer="thread"), stop])
    assert len(found.fit(X, Y, epochs=2, verbose=0).history["loss"]) == 2


def failing(batch: int) -> Any:
    return keras.callbacks.LambdaCallback(on_train_batch_end=lambda number, logs: 1 / (number - batch))


def test_a_fit_that_failed_in_the_epoch_it_resumed_leaves_the_next_one_its_batches(tmp_path: Path) -> None:
    """The next one has no Backup. The resumed one failed while it left out a batch, or at its first own."""
    for at in (1, 0, 2):  # the first one is interrupted after batch 1, which is saved
        found, backup = model(), Backup(str(tmp_path), run="r", save_freq=2, writer="thread")
        with pytest.raises(ZeroDivisionError):
            found.fit(X, Y, batch_size=4, verbose=0, callbacks=[backup, failing(at)])
        backup._checkpointer.wait()
        before = int(found.optimizer.iterations)
        found.fit(X, Y, batch_size=4, verbose=0)
        assert int(found.optimizer.iterations) == before + 3
        assert not isinstance(found.train_function, partial)


@pytest.mark.parametrize("options", [{"save_freq": 0}, {"save_freq": "step"}, {"endless": True}])
def test_arguments_that_mean_nothing_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        Backup(str(tmp_path), run="r", **options)


def test_variables_in_a_loop_of_its_own(tmp_path: Path) -> None:
    first, other = model(), model()
    with Checkpointer(str(tmp_path), run="r", writer="thread") as run:
        assert restore(first, checkpointer=run) == 0
        first.train_on_batch(X, Y)
        keras.random.normal(())
        handle = present(save_async(first, 4, checkpointer=run, metrics={"loss": 0.5}))
        assert handle.result(60).metrics == {"loss": 0.5}
        drawn = float(keras.random.normal(()))
        assert restore(other, checkpointer=run) == 5
        assert float(keras.random.normal(())) == drawn
        assert {"weights/first/kernel", "optimizer/iteration", "seeds/global"} <= run.load().keys()
    assert all(map(np.array_equal, first.get_weights(), other.get_weights()))
    assert first.train_on_batch(X, Y) == other.train_on_batch(X, Y)
