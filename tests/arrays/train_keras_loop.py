"""A loop over a Keras model under a strategy of TensorFlow: python -m tests.arrays.train_keras_loop FOLDER RUN KILL_AT
STRATEGY.

It prints `restored DIGEST` and, for each step, `STEP LOSS DIGEST`, with digests of all weights, optimizer variables and
seeds. KILL_AT: the step after which it kills itself; 0: never. STRATEGY: multi (by TF_CONFIG), server (a worker and a
parameter server in this process), mirrored, or one.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ckpt
from ckpt.integrations.keras import steps
from ckptstore.errors import InvalidRequest
from tests.arrays.train_keras import arrays, build
from tests.support.ports import free_port
from tests.support.waiting import wait_until

STEPS, BATCH, EVERY = 12, 8, 3
SERVERS: list[Any] = []


def strategy_of(name: str) -> Any:
    """A strategy, with few threads."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    if name == "multi":
        return tf.distribute.MultiWorkerMirroredStrategy()
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    if name == "mirrored":
        return tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])
    if name == "one":
        return tf.distribute.OneDeviceStrategy("/cpu:0")
    spec = tf.train.ClusterSpec({job: [f"127.0.0.1:{free_port()}"] for job in ("worker", "ps")})
    SERVERS.extend(tf.distribute.Server(spec, job_name=job, task_index=0) for job in spec.jobs)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(spec, rpc_layer="grpc")
    return tf.distribute.ParameterServerStrategy(resolver)


def batches(start: int) -> Any:
    """Those from a step on: each has samples of its own choice."""
    x, y = arrays()
    order = np.concatenate([np.random.default_rng(step).permutation(len(x))[:BATCH] for step in range(STEPS)])
    return tf.data.Dataset.from_tensor_slices((x[order], y[order])).batch(BATCH).skip(start)


def losses(strategy: Any, model: Any, start: int) -> Any:
    """The losses of the steps from `start` on, each when it was trained."""

    def train(pair: Any) -> Any:
        with tf.GradientTape() as tape:
            error = model(pair[0], training=True) - pair[1]
            loss = tf.reduce_sum(error * error) / BATCH
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function  # type: ignore[untyped-decorator]
    def step(iterator: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(train, args=(next(iterator),)), axis=None)

    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        data = strategy.distribute_datasets_from_function(lambda _: batches(start))
        iterator = iter(coordinator.create_per_worker_dataset(data))
        for _ in range(start, STEPS):
            result = coordinator.schedule(step, args=(iterator,))
            coordinator.join()
            yield float(result.fetch())
    else:
        iterator = iter(strategy.experimental_distribute_dataset(batches(start)))
        for _ in range(start, STEPS):
            yield float(step(iterator))


def digest(model: Any) -> str:
    """Of everything that a checkpoint has."""
    found = hashlib.sha256()
    for one in (*model.variables, *model.optimizer.variables):
        found.update(one.path.encode() + one.numpy().tobytes())
    return found.hexdigest()


def meet(folder: str, run: str) -> None:
    """Let the chief end last: its end takes the others with it."""
    sign = Path(folder) / f"{run}.done"
    if is_first():
        wait_until(sign.exists)
    else:
        sign.touch()


def is_first() -> bool:
    """Whether this is the first worker of a job, or alone."""
    config = json.loads(os.environ.get("TF_CONFIG", "{}"))
    return "task" not in config or config["task"]["index"] == 0


def main(folder: str, run: str, kill_at: int, name: str) -> None:
    """Train."""
    strategy = strategy_of(name)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = build()
    ckpt.init(folder, run=run)
    if name == "multi":
        with pytest.raises(InvalidRequest, match="no schedule in common"):
            steps(model, STEPS)
    loop = steps(model, STEPS, schedule=EVERY)
    print("restored", digest(model), flush=True)
    trained = losses(strategy, model, loop.step + 1)
    for step in loop:
        print(step, next(trained).hex(), digest(model), flush=True)
        if step == kill_at != 0:
            os.kill(os.getpid(), signal.SIGKILL)
    ckpt.close()
    if name == "multi":
        meet(folder, run)
    os._exit(0)  # servers and coordinators of TensorFlow have threads that do not end


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
