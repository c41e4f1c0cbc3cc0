"""Arrays of JAX on eight devices: any sharding, any type, keys, donation; and what is refused, by name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ckpt
from ckpt import Checkpointer
from ckptstore.errors import InvalidRequest, StateMismatch, UnsupportedObject
from tests.support.waiting import present

ROOT = Path(__file__).parents[2]
ONE = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
OTHER = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))


class Moments(NamedTuple):
    """As optax keeps them."""

    count: Any
    mu: Any


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Checkpointer]:
    with Checkpointer(str(tmp_path), run="r", writer="thread") as checkpointer:
        yield checkpointer


def put(array: Any, *spec: Any) -> Any:
    return jax.device_put(array, NamedSharding(ONE, P(*spec)))


def some_state() -> dict[str, Any]:
    numbers = np.random.default_rng(0)
    return {
        "cut twice": put(numbers.standard_normal((64, 48)).astype(np.float32), "a", "b"),
        "cut by both": put(numbers.standard_normal(64), ("a", "b")),
        "half": put(jnp.asarray(numbers.standard_normal((16, 8)), jnp.bfloat16), None, "b"),
        "eighth": put(jnp.arange(16.0).astype(jnp.float8_e4m3fn), "a"),
        "replicated": put(jnp.arange(5)),
        "one device": jax.device_put(jnp.arange(3), jax.devices()[5]),
        "moments": Moments(jnp.int32(3), [put(jnp.ones((8, 2)), "a"), jnp.zeros((0, 3))]),
        "key": jax.random.key(7),
        "keys": put(jax.random.split(jax.random.key(7, impl="rbg"), 8), "a"),
        "old key": jax.random.PRNGKey(3),
        "flags": jnp.array([True, False]),
        "numpy": np.arange(4),
        "plain": (3, "text", None),
    }


def bits(value: Any) -> Any:
    if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        return str(jax.random.key_impl(value)), bits(jax.random.key_data(value))
    return (str(value.dtype), np.asarray(value).tobytes()) if hasattr(value, "dtype") else value


def same(one: Any, other: Any) -> bool:
    return jax.tree.map(bits, one) == jax.tree.map(bits, other)  # type: ignore[no-any-return]


def restored(run: Checkpointer, template: Any, **options: Any) -> Any:
    return present(run.restore(shared={"state": template}, **options)).values["state"]


def test_the_same_shardings(run: Checkpointer) -> None:
    state = some_state()
    run.save(None, None, 1, shared={"state": state})
    found = restored(run, jax.tree.map(lambda leaf: leaf * 0 if isinstance(leaf, np.ndarray) else leaf, state))
    assert same(found, state)
    assert type(found["moments"]) is Moments
    for name in ("cut twice", "half", "keys", "one device"):
        assert found[name].sharding == state[name].sharding
    assert not found["flags"].committed


def test_another_mesh_by_description(run: Checkpointer) -> None:
    state = some_state()
    run.save(None, None, 1, shared={"state": state})

    def describe(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        spec = P("y", "x") if leaf.shape == (64, 48) else P(("y", "x")) if leaf.shape == (64,) else P()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(OTHER, spec))

    found = restored(run, jax.tree.map(describe, state))
    assert same(found, state)
    assert found["cut twice"].sharding == NamedSharding(OTHER, P("y", "x"))
    assert len(found["replicated"].addressable_shards) == 8


def test_equal_replicas_are_stored_once(run: Checkpointer) -> None:
    saved = run.save(None, None, 1, shared={"state": {"w": put(jnp.zeros((64, 48)), "a"), "same": put(jnp.ones(1000))}})
    assert saved.raw_bytes == 64 * 48 * 4 + 1000 * 4


def test_without_a_template_arrays_are_those_of_numpy(run: Checkpointer) -> None:
    state = some_state()
    run.save(None, None, 1, shared={"state": state}, own={"large": jnp.arange(50_000), "small": jnp.arange(3)})
    found = present(run.restore())
    assert type(found.values["state"]["half"]) is np.ndarray
    assert bits(found.values["state"]["half"]) == bits(state["half"])
    assert found.values["own"]["large"].sum() == np.arange(50_000).sum()
    own = run.restore(own={"large": jnp.zeros(50_000, int), "small": jnp.zeros(3, int)}, shared={"state": None})
    assert own is not None
    assert isinstance(own.values["own"]["large"], jax.Array)
    assert same(own.values["own"]["small"], jnp.arange(3))


def test_a_save_is_the_state_of_the_call_although_its_arrays_are_donated(run: Checkpointer) -> None:
    increase = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)
    state = {"w": put(jnp.zeros((512, 256)), "a", "b"), "b": jnp.zeros(300_000)}
    handles = []
    for step in range(6):
        handles.append(run.save_async(None, None, step, shared={"state": state}))
        before, address = state, state["w"].addressable_data(0).unsafe_buffer_pointer()
        state = increase(state)
        assert before["w"].is_deleted()  # a save keeps nothing from being donated
        assert state["w"].addressable_data(0).unsafe_buffer_pointer() == address
    for step, handle in enumerate(handles):
        handle.result(120)
        for found in run.load(step).values():
            assert np.array_equal(found, np.full_like(found, step))
    with pytest.raises(UnsupportedObject, match=r"'state/\w' was deleted or donated"):
        run.save(None, None, 9, shared={"state": before})


def test_a_donated_state_is_still_a_template(run: Checkpointer) -> None:
    state = {"w": put(jnp.arange(8.0), "a")}
    run.save(None, None, 1, shared={"state": state})
    jax.jit(lambda tree: tree["w"] + 1, donate_argnums=0)(state)
    assert state["w"].is_deleted()
    assert np.array_equal(restored(run, state)["w"], np.arange(8.0))


def test_a_restore_in_place_is_a_new_branch(run: Checkpointer) -> None:
    state = {"w": jnp.zeros(4)}
    for step in (1, 2):
        run.save(None, None, step, shared={"state": state})
    restored(run, state, checkpoint=1)
    run.save(None, None, 2, shared={"state": {"w": jnp.ones(4)}})
    newest = present(run.latest())
    assert (newest.step, newest.attempt.generation) == (2, 2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"w": jnp.zeros((3, 3))}, r"state/w: \[4\] in the checkpoint, \[3, 3\] here"),
        ({"w": jnp.zeros(4, jnp.bfloat16)}, "state/w: float32 in the checkpoint, bfloat16 here"),
        ({"more": jnp.zeros(2)}, "not in the checkpoint: state/more"),
        ({"w": None}, "only in the checkpoint: state/w"),
        ({"k": jnp.zeros(2, jnp.uint32)}, "state/k: typed keys of random numbers on one side only"),
    ],
)
def test_what_does_not_fit_is_refused(run: Checkpointer, change: dict[str, Any], said: str) -> None:
    state = {"w": jnp.arange(4.0), "k": jax.random.key(1)}
    run.save(None, None, 1, shared={"state": state})
    with pytest.raises(StateMismatch, match=said):
        run.restore(shared={"state": {**state, **change}})
    cast = restored(run, {**state, "w": jnp.zeros(4, jnp.bfloat16)}, strict=False)
    assert same(cast["w"], jnp.arange(4.0).astype(jnp.bfloat16))


def test_what_cannot_be_stored_is_refused_by_name(run: Checkpointer) -> None:
    with pytest.raises(UnsupportedObject, match=r"'state/q' has type int4"):
        run.save(None, None, 1, shared={"state": {"q": jnp.zeros(4, jnp.int4)}})

    def inside(array: Any) -> Any:
        run.save(None, None, 1, shared={"state": {"w": array}})
        return array

    with pytest.raises(UnsupportedObject, match=r"'state/w' is a \w*Tracer"):
        jax.jit(inside)(jnp.ones(3))
    with pytest.raises(InvalidRequest, match=r"shared=\{...\}"):
        run.save({"w": jnp.ones(3)}, None, 1)


def test_a_state_without_memory_for_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000000000")
    state = {
        "big": put(np.random.default_rng(1).standard_normal((4096, 1500)).astype(np.float32), "a"),
        "s": jnp.ones(3),
    }
    with Checkpointer(str(tmp_path), run="r") as run:
        run.save(None, None, 1, shared={"state": state})
        assert run.saver_pid is None
        assert same(restored(run, state), state)


def test_torch_reads_what_jax_wrote_and_jax_what_torch_wrote(tmp_path: Path) -> None:
    python = ROOT / ".venv/bin/python"
    if not python.exists():
        pytest.skip("no environment with torch beside this one")
    state = some_state()
    with Checkpointer(str(tmp_path), run="jax", writer="thread") as run:
        run.save(None, None, 1, shared={"state": state})
    script = (
        "import sys, torch, ckpt\n"
        "run = ckpt.Checkpointer(sys.argv[1], run='jax', writer='thread')\n"
        "found, values = run.load(), run.restore().values['state']\n"
        "assert found['state/half'].dtype is torch.bfloat16 and found['state/eighth'].dtype is torch.float8_e4m3fn\n"
        # An array where ml_dtypes is installed (Keras brings it), else a tensor.
        "assert str(values['half'].dtype).endswith('bfloat16') and values['plain'] == (3, 'text', None)\n"
        "print(found['state/cut twice'].double().sum().item().hex())\n"
        "model = torch.nn.Linear(30, 20)\n"
        "other = ckpt.Checkpointer(sys.argv[1], run='torch', writer='thread')\n"
        "other.save(model, None, 1, shared={'t': model.weight})\n"
        "print(model.weight.double().sum().item().hex())"
    )
    done = subprocess.run([python, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    ours, theirs = map(float.fromhex, done.stdout.split())
    assert ours == np.asarray(state["cut twice"]).astype(np.float64).sum()
    with Checkpointer(str(tmp_path), run="torch", writer="thread") as run:
        found = present(run.restore(shared={"t": jax.ShapeDtypeStruct((20, 30), jnp.float32)}))
        assert np.asarray(run.load()["model/weight"]).astype(np.float64).sum() == pytest.approx(theirs)
        assert np.array_equal(np.asarray(found.values["t"]), run.load()["model/weight"])
    assert "torch" not in sys.modules
    assert ckpt.Checkpointer is Checkpointer
