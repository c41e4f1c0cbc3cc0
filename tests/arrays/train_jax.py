"""A training loop of flax and optax, with shuffling, dropout and a schedule, as one process or several.

Arguments: store, steps, the step after which to be killed (-1: none), rank, processes, port of the coordinator, and the
file for its lines: Gloo writes to the standard output.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ckpt
from ckpt.integrations.jax import restore, steps

SAMPLES, BATCH = 96, 16


class Net(nn.Module):  # type: ignore[misc]
    """Two layers with dropout."""

    @nn.compact  # type: ignore[untyped-decorator]
    def __call__(self, x: Any, train: bool) -> Any:
        x = nn.relu(nn.Dense(64)(x))
        x = nn.Dropout(0.3, deterministic=not train)(x)
        return nn.Dense(8)(x)


class State(TrainState):  # type: ignore[misc]
    """Also the key of the dropout masks."""

    key: Any


def sharding(mesh: Mesh, leaf: Any) -> NamedSharding:
    """Matrices are cut over all devices, the rest is replicated."""
    return NamedSharding(mesh, P("all") if getattr(leaf, "ndim", 0) == 2 else P())


def begin(mesh: Mesh) -> Any:
    net = Net()
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-2, 40)))

    def make() -> Any:
        params = net.init(jax.random.key(1), jnp.zeros((1, 16)), False)["params"]
        return State.create(apply_fn=net.apply, params=params, tx=tx, key=jax.random.key(2))

    shapes = jax.eval_shape(make)
    return jax.jit(make, out_shardings=jax.tree.map(partial(sharding, mesh), shapes))()


@partial(jax.jit, donate_argnums=0)
def train_step(state: State, x: Any, y: Any) -> tuple[State, Any]:
    """One step; the old state's memory is reused."""

    def loss_of(params: Any) -> Any:
        key = jax.random.fold_in(state.key, state.step)
        logits = state.apply_fn({"params": params}, x, True, rngs={"dropout": key})
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=grads), loss


def batch(step: int, data: Any, labels: Any) -> tuple[Any, Any]:
    """The batch of a step: each epoch has an order of its own."""
    epoch, number = divmod(step, SAMPLES // BATCH)
    chosen = np.random.default_rng(epoch).permutation(SAMPLES)[number * BATCH : (number + 1) * BATCH]
    return data[chosen], labels[chosen]


def main(store: str, num_steps: int, kill_at: int, rank: int, processes: int, port: str, file: str) -> None:
    output = open(file, "w", buffering=1)  # noqa: SIM115 - until the end
    if processes > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", processes, rank)
    mesh, rng = Mesh(np.array(jax.devices()), ("all",)), np.random.default_rng(0)
    data, labels = rng.standard_normal((SAMPLES, 16)).astype(np.float32), rng.integers(0, 8, SAMPLES)
    state = begin(mesh)
    ckpt.init(store, run="jax", peer_timeout_s=120)
    state, start = restore(state)
    for step in steps(lambda: state, start, num_steps, schedule=1):  # noqa: B023 - the newest state is meant
        if step - 1 == kill_at >= 0:
            ckpt.wait(120)
            os.kill(os.getpid(), signal.SIGKILL)
        state, loss = train_step(state, *batch(step, data, labels))
        print(step, float(loss).hex(), file=output)
    ckpt.close()
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves((state.params, state.opt_state)):
        for shard in leaf.addressable_shards:
            digest.update(np.asarray(shard.data).tobytes())
    print("weights", digest.hexdigest(), "torch" in sys.modules, file=output)


if __name__ == "__main__":
    numbers = list(map(int, sys.argv[2:6]))
    main(sys.argv[1], numbers[0], numbers[1], numbers[2], numbers[3], sys.argv[6], sys.argv[7])
