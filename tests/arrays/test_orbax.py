"""Folders that Orbax wrote: `ckptctl import` finds their kind, and a JAX program continues from the checkpoint."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh

import ckpt
from ckpt.integrations.jax import restore
from tests.arrays.train_jax import begin, train_step
from tests.support.command_line import Finished, invoke, succeed

ONE = {"layer": {"kernel": jnp.arange(24.0).reshape(2, 3, 4), "bias": jnp.full(4, 0.5, jnp.bfloat16)}, "step": 7}


def trained(steps: int) -> Any:
    """A state of flax and optax on all devices, without its key: Orbax saves that as plain numbers."""
    state = begin(Mesh(np.array(jax.devices()), ("all",)))
    data = np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32)
    for _ in range(steps):
        state, _ = train_step(state, data, np.arange(16) % 8)
    return {"params": state.params, "opt_state": state.opt_state, "step": state.step}


def saved(folder: Path, state: Any, **options: Any) -> Path:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(folder, args=ocp.args.PyTreeSave(state))
    return folder


def imported(folder: Path, store: Path, *options: str) -> Any:
    store.mkdir(exist_ok=True)
    return json.loads(
        succeed("import", folder, "run@3", *options, "--item", "state", "--store", store, "-o", "json").stdout
    )


def restored(store: Path, state: Any) -> tuple[Any, int]:
    with ckpt.Checkpointer(str(store), run="run", writer="thread") as checkpointer:
        return restore(state, checkpointer=checkpointer)


def test_a_program_continues_from_a_manager_s_step(tmp_path: Path) -> None:
    state = trained(3)
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(3, args=ocp.args.StandardSave(state))
    body = imported(tmp_path / "run/3", tmp_path / "store")
    assert (body["format"], body["items"], body["notes"]) == ("orbax", ["state"], [])
    found, start = restored(tmp_path / "store", trained(0))
    assert start == 4
    assert jax.tree.structure(found) == jax.tree.structure(state)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize("ocdbt", [True, False])
@pytest.mark.parametrize("zarr3", [True, False])
def test_every_layout_of_arrays(tmp_path: Path, ocdbt: bool, zarr3: bool) -> None:
    folder = saved(tmp_path / "one", ONE, use_ocdbt=ocdbt, use_zarr3=zarr3)
    imported(folder, tmp_path / "store")
    empty = jax.tree.map(lambda leaf: leaf * 0, ONE)
    found, _ = restored(tmp_path / "store", empty)
    assert found["step"] == 7
    for name, leaf in ONE["layer"].items():  # type: ignore[attr-defined]
        assert np.asarray(found["layer"][name]).tobytes() == np.asarray(leaf).tobytes()
        assert found["layer"][name].dtype == leaf.dtype


def test_items_of_a_step_keep_their_names_and_texts_are_left_out(tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path / "run", item_names=("net", "average")) as manager:
        state = ocp.args.PyTreeSave({**ONE, "who": "me", "none": None})
        manager.save(3, args=ocp.args.Composite(net=state, average=ocp.args.StandardSave({"a": jnp.ones(3)})))
    body = imported(tmp_path / "run/3", tmp_path / "store")
    assert body["items"] == ["average", "net"]
    assert body["notes"] == ["who is left out: a text cannot be imported"]
    assert body["num_entries"] == 3


def refused(folder: Path, store: Path) -> Finished:
    store.mkdir(exist_ok=True)
    done = invoke("import", folder, "run@3", "--store", store, "-o", "json")
    assert done.code != 0
    return done


def test_a_type_that_no_checkpoint_holds_is_named(tmp_path: Path) -> None:
    done = refused(saved(tmp_path / "int4", {"a": jnp.ones(4, jnp.int4)}), tmp_path / "store")
    assert done.error["code"] == "unsupported_object"
    assert "int4" in done.error["message"]


@pytest.mark.parametrize("ocdbt", [True, False])
def test_damage_is_found(tmp_path: Path, ocdbt: bool) -> None:
    folder = saved(tmp_path / "one", ONE, use_ocdbt=ocdbt)
    for path in [*folder.glob("d/*"), *folder.glob("ocdbt.process_0/d/*"), *folder.glob("layer.kernel/0*")]:
        path.write_bytes(path.read_bytes()[:-3])
    assert refused(folder, tmp_path / "store").error["code"] == "corrupt"


@pytest.mark.parametrize("tree", ["{", '{"tree_metadata": {"a": 1}}'])
def test_a_malformed_description_is_damage(tmp_path: Path, tree: str) -> None:
    folder = saved(tmp_path / "one", ONE)
    (folder / "_METADATA").write_text(tree)
    assert refused(folder, tmp_path / "store").error["code"] == "corrupt"


def test_a_name_that_leads_out_of_the_folder_is_damage(tmp_path: Path) -> None:
    folder, other = saved(tmp_path / "one", ONE, use_ocdbt=False), saved(tmp_path / "other", ONE, use_ocdbt=False)
    described = json.loads((folder / "_METADATA").read_text())
    leaf = next(iter(described["tree_metadata"].values()))
    leaf["key_metadata"] = [{"key": f"x/../../{other.name}/step", "key_type": 2}]
    (folder / "_METADATA").write_text(json.dumps(described))
    assert "outside" in refused(folder, tmp_path / "store").error["message"]


def test_without_tensorstore_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tmp_path / "one", ONE)
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    done = refused(folder, tmp_path / "store")
    assert done.error["code"] == "invalid_request"
    assert "pip install tensorstore" in done.stderr + done.stdout
