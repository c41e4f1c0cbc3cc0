"""A training loop of JAX and optax that resumes where it was, in the manner of Orbax's CheckpointManager.

pip install 'ckptd[jax]'
python examples/train_jax.py file:///tmp/ckpts      # kill it, and run it again

Orbax                                               here
ocp.CheckpointManager(directory, options=...)       ckpt.init(store, run=...)
manager.latest_step(), manager.restore(step, ...)   state, start = restore(state)
manager.save(step, args=ocp.args.StandardSave(..))  save_async(state, step)
options.save_interval_steps                         steps(lambda: state, start, STEPS, schedule=...)
options.max_to_keep                                 ckptctl policy, ckptctl prune
manager.wait_until_finished(), manager.close()      ckpt.wait(), ckpt.close()
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import ckpt
from ckpt.integrations.jax import restore, steps

STEPS = 2000
optimizer = optax.adamw(1e-3)


def begin() -> dict[str, Any]:
    """The state at step 0."""
    first, second = jax.random.split(jax.random.key(0))
    params = {
        "hidden": jax.random.normal(first, (32, 256)) * 0.1,
        "out": jax.random.normal(second, (256, 1)) * 0.1,
    }
    return {"params": params, "opt_state": optimizer.init(params), "key": jax.random.key(1)}


@partial(jax.jit, donate_argnums=0)
def train_step(state: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """One step on random data; the memory of the old state is reused."""
    key, batch = jax.random.split(state["key"])
    x = jax.random.normal(batch, (128, 32))

    def loss_of(params: Any) -> Any:
        predicted = jnp.tanh(x @ params["hidden"]) @ params["out"]
        return jnp.mean((predicted[:, 0] - jnp.sin(x).sum(axis=1)) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(state["params"])
    updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state, "key": key}, loss


def main(store: str) -> None:
    """Train, from the newest checkpoint on."""
    ckpt.init(store, run="jax-example")
    state, start = restore(begin())
    for step in steps(lambda: state, start, STEPS):  # noqa: B023 - the newest state is meant
        state, loss = train_step(state)
        if step % 200 == 0:
            print(f"step {step}: loss {float(loss):.4f}", flush=True)
    ckpt.close()


if __name__ == "__main__":
    main(sys.argv[1])
