"""Pytrees by name: flax nnx as it is and split, states of optax, and what does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from ckpt import Checkpointer
from ckpt.integrations.jax import named, restore, save_async
from ckptstore.errors import StateMismatch
from tests.support.waiting import present


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Checkpointer]:
    with Checkpointer(str(tmp_path), run="r", writer="thread") as checkpointer:
        yield checkpointer


class Net(nnx.Module):  # type: ignore[misc]
    def __init__(self, seed: int) -> None:
        rngs = nnx.Rngs(seed)
        self.first, self.norm = nnx.Linear(4, 3, rngs=rngs), nnx.BatchNorm(3, rngs=rngs)
        self.dropout, self.blocks = nnx.Dropout(0.2, rngs=rngs), nnx.List([nnx.Linear(3, 3, rngs=rngs)])

    def __call__(self, x: Any) -> Any:
        return self.dropout(self.blocks[0](self.norm(self.first(x))))


def begin(seed: int) -> tuple[Any, Any]:
    net = Net(seed)
    return net, nnx.Optimizer(net, optax.adam(1e-2), wrt=nnx.Param)


def train(net: Any, optimizer: Any, steps: int) -> list[float]:
    @nnx.jit  # type: ignore[untyped-decorator]
    def step(net: Any, optimizer: Any, x: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda net: ((net(x) - 1) ** 2).mean())(net)
        optimizer.update(net, grads)
        return loss

    return [float(step(net, optimizer, jnp.ones((8, 4)) * i)) for i in range(steps)]


@pytest.mark.parametrize("split", [False, True])
def test_modules_of_nnx_and_their_random_streams_continue(run: Checkpointer, split: bool) -> None:
    net, optimizer = begin(0)
    train(net, optimizer, 3)
    save_async(nnx.state((net, optimizer)) if split else (net, optimizer), 3, checkpointer=run).result(120)
    other = begin(5)
    if split:
        state, start = restore(nnx.state(other), checkpointer=run)
        nnx.update(other, state)
    else:
        other, start = restore(other, checkpointer=run)
    assert (start, train(net, optimizer, 4)) == (4, train(*other, 4))
    assert "state/1/opt_state/0/mu/blocks/0/kernel/value" in run.load(names="state/1/*")


def test_states_of_optax_have_the_names_of_their_fields(run: Checkpointer) -> None:
    params = {"w": jnp.ones((2, 3))}
    state = {"params": params, "opt": optax.chain(optax.clip(1.0), optax.adam(1e-3)).init(params), "number": 3}
    names = {"params": {"w"}, "opt": {"1"}, "number": 3}
    assert {key: set(held) if isinstance(held, dict) else held for key, held in named(state).items()} == names
    assert restore(state, checkpointer=run) == (state, 0)
    save_async(state, 1, checkpointer=run, metrics={"loss": 0.5}).result(120)
    assert run.load().keys() == {
        "state/params/w", "state/opt/1/0/count", "state/opt/1/0/mu/w", "state/opt/1/0/nu/w"
    }  # fmt: skip
    found, start = restore(jax.tree.map(lambda leaf: leaf * 0, state), checkpointer=run)
    assert (found["number"], start) == (3, 2)
    assert type(found["opt"][1][0]) is type(state["opt"][1][0])
    assert present(run.latest()).metrics == {"loss": 0.5}


def test_a_state_of_another_structure_is_refused(run: Checkpointer) -> None:
    state = {"w": jnp.ones(2), "number": 3}
    save_async(state, 1, checkpointer=run).result(120)
    with pytest.raises(StateMismatch, match="not in the checkpoint: state/more"):
        restore({**state, "more": jnp.ones(1)}, checkpointer=run)
    with pytest.raises(StateMismatch, match="does not have state/seconds"):
        restore({**state, "seconds": 4.5}, checkpointer=run)
