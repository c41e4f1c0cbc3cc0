"""A `fit` of Keras on any back end that kills itself: python -m tests.arrays.train_keras FOLDER RUN KILL_AT OPTION...

It prints `BATCH LOGS` for each trained batch, counted from the beginning, with the numbers as exact floats, and at the
end `weights DIGEST`. The logs are means of the epoch so far, so they also show that metrics continue. KILL_AT: the
number of batches after which it kills itself; 0: never. OPTION: the data (see `data`), plain (without this project),
unseeded, mirrored or central (a strategy of TensorFlow over two devices).
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import numpy as np

from ckpt.integrations.keras import Backup

SAMPLES, BATCH, EPOCHS = 52, 8, 3  # seven batches in an epoch, the last one smaller
STEPS = 7
BACKEND = keras.backend.backend()


class Report(keras.callbacks.Callback):  # type: ignore[misc]
    """Prints what was trained, and ends the program."""

    def __init__(self, kill_at: int) -> None:
        super().__init__()
        self._kill_at = kill_at

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if not logs:
            return  # left out
        number = self._epoch * STEPS + batch + 1
        print(number, *(f"{name}={float(value).hex()}" for name, value in sorted(logs.items())), flush=True)
        if number == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        print("epoch", epoch, *(f"{name}={float(value).hex()}" for name, value in sorted(logs.items())), flush=True)


def build(dropout: bool = True) -> Any:
    """A compiled model."""
    layers = [keras.Input((6,)), keras.layers.Dense(16, activation="relu", name="first")]
    if dropout:
        layers += [keras.layers.BatchNormalization(name="norm"), keras.layers.Dropout(0.3)]
    model = keras.Sequential([*layers, keras.layers.Dense(1, name="last")])
    schedule = keras.optimizers.schedules.CosineDecay(1e-2, EPOCHS * STEPS)
    model.compile(optimizer=keras.optimizers.Adam(schedule), loss="mse", metrics=["mae"])
    return model


def arrays() -> tuple[Any, Any]:
    """Samples and targets, the same in every process."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((SAMPLES, 6)).astype(np.float32)
    return x, (x.sum(1, keepdims=True) + rng.standard_normal((SAMPLES, 1)) / 9).astype(np.float32)


class Batches(keras.utils.PyDataset):  # type: ignore[misc]
    """A data set of batches, which `fit` shuffles; it draws random numbers itself where nothing is fetched ahead."""

    def __init__(self) -> None:
        super().__init__()
        self._x, self._y = arrays()

    @property
    def num_batches(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> Any:
        at = slice(index * BATCH, (index + 1) * BATCH)
        noise = np.random.standard_normal() if BACKEND != "tensorflow" else 0.0
        return self._x[at] + np.float32(noise), self._y[at]


def data(options: Sequence[str]) -> dict[str, Any]:
    """What `fit` gets: batches (a PyDataset), loader (of torch), dataset (of TensorFlow), filtered (one of unknown
    length), endless (one that is repeated), short (epochs of fewer steps than the data have), or arrays."""
    x, y = arrays()
    if "batches" in options:
        return {"x": Batches()}
    if "loader" in options:
        import torch

        pairs = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
        return {"x": torch.utils.data.DataLoader(pairs, BATCH, shuffle=True), "shuffle": False}
    if {"dataset", "filtered", "endless", "short"} & set(options):
        import tensorflow as tf

        found = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(SAMPLES).batch(BATCH)
        if "filtered" in options:
            return {"x": found.filter(lambda *_: True), "shuffle": False}
        if "endless" in options:
            return {"x": found.repeat(), "steps_per_epoch": STEPS, "shuffle": False}
        return {"x": found, "shuffle": False, **({"steps_per_epoch": 2} if "short" in options else {})}
    return {"x": x, "y": y, "batch_size": BATCH}


def scope(options: Sequence[str]) -> AbstractContextManager[object]:
    """The scope of a strategy; few threads."""
    if BACKEND != "tensorflow":
        return nullcontext()
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = tf.distribute.get_strategy()
    if "mirrored" in options:
        strategy = tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])
    if "central" in options:
        strategy = tf.distribute.experimental.CentralStorageStrategy(["/cpu:0", "/cpu:1"], "/cpu:0")
    scope: AbstractContextManager[object] = strategy.scope()
    return scope


def report_end(model: Any, folder: str, run: str) -> None:
    """Print a digest of all weights and optimizer variables, and keep what `get_weights` returns, by name."""
    found = hashlib.sha256()
    for one in (*model.weights, *model.optimizer.variables):
        found.update(one.path.encode() + keras.ops.convert_to_numpy(one.value).tobytes())
    names = [one.path.partition("/")[2] for one in model.weights]  # without the name of the model
    np.savez(f"{folder}/{run}.npz", **dict(zip(names, model.get_weights(), strict=True)))
    print("weights", found.hexdigest(), flush=True)


def main(folder: str, run: str, kill_at: int, *options: str) -> None:
    """Train."""
    with scope(options):
        # A data set of TensorFlow is shuffled by the seed of the program, which must be the same when it resumes.
        if "unseeded" not in options:
            keras.utils.set_random_seed(1 if BACKEND == "tensorflow" or "plain" in options or kill_at else 77)
        model = build(dropout="central" not in options)
    callbacks: list[Any] = [Report(kill_at)]
    if "plain" not in options:
        callbacks.insert(0, Backup(folder, run=run, save_freq=4, endless="endless" in options))
    model.fit(**data(options), epochs=EPOCHS, verbose=0, callbacks=callbacks)
    report_end(model, folder, run)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
