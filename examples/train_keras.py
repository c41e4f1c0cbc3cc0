"""Keras 3: a callback saves, and `fit` goes on where it was, in the middle of an epoch too.

pip install 'ckptd[keras,torch]'; export KERAS_BACKEND=torch      # or jax, tensorflow
python examples/train_keras.py file:///tmp/ckpts 1                # one epoch
python examples/train_keras.py file:///tmp/ckpts                  # goes on to the end; kill it, and run it again
"""

from __future__ import annotations

import sys
from typing import Any

import keras
import numpy as np

from ckpt.integrations.keras import Backup


class Report(keras.callbacks.Callback):  # type: ignore[misc]
    """Prints the loss: the mean of the epoch so far."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Batches that were trained before the checkpoint have no logs."""
        if logs:
            print(f"step {int(self.model.optimizer.iterations)}  loss {logs['loss']:.6f}", flush=True)


def main(store: str, epochs: int = 3) -> None:
    """Train to the last epoch."""
    keras.utils.set_random_seed(0)
    x = np.random.standard_normal((64, 8)).astype(np.float32)
    layers = [keras.Input((8,)), keras.layers.Dense(16, "relu", name="hidden"), keras.layers.Dropout(0.1)]
    model = keras.Sequential([*layers, keras.layers.Dense(1, name="out")])
    model.compile(optimizer=keras.optimizers.AdamW(0.01), loss="mse")
    saves = Backup(store, run="keras", save_freq=3)
    model.fit(x, x.sum(axis=1), batch_size=8, epochs=epochs, verbose=0, callbacks=[saves, Report()])


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
