import argparse
import os
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

from ckptstore.commits.catalog import list_checkpoints
from ckptstore.reading.source import StoreSource, read_manifest
from ckptstore.run import Run
from ckptstore.stores import open_store
from tests.ckpt.dcp_state import flat_optimizer_state, make_model, make_optimizer, same
from tests.ckpt.foreign.conftest import Payload, assert_restores, given_back, refused, take
from tests.support.command_line import invoke
from tests.support.parallel.runner import Scenario, run_scenario

dcp: Any = torch.distributed.checkpoint  # it exports without saying so


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save(tmp_path / "dcp", {"model": {"w": torch.arange(60.0).reshape(20, 3)}, "step": 5})


def save(folder: Path, state: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def change(folder: Path, how: Callable[[Metadata], object]) -> None:
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    how(metadata)
    path.write_bytes(pickle.dumps(metadata))


def test_what_ranks_saved_in_pieces_restores_into_one_process(store: Path, tmp_path: Path) -> None:
    run_scenario(Scenario(f"{__name__}:save_in_pieces", 2, {"folder": str(tmp_path / "dcp")}), tmp_path / "ranks")
    model = make_model(1)
    optim = make_optimizer(model)
    for form in ("tree", "flat"):
        done = take(store, tmp_path / "dcp" / form, form)
        assert (done.code, done.json["items"]) == (0, ["history", "model", "optim", "step"])
        assert done.json["notes"] == []
        assert_restores(store, model, optim, form)
        state = given_back(store, form)
        assert (state["step"], state["history"]) == (5, [0.5, {"loss": 0.25}])
    source = StoreSource(open_store(str(store)))
    manifest = read_manifest(source, list_checkpoints(Run(source.store, "tree"))[0])
    assert len(manifest.content.slices.at) > len(manifest.content.entries.name)


def save_in_pieces(folder: str) -> None:
    """The same state under FSDP2, with the optimizer as a tree and with flat keys."""
    model = make_model(1)
    for layer in (model[0], model[2], model):  # type: ignore[index]
        fully_shard(layer)
    optim, more = make_optimizer(model), {"step": 5, "history": [0.5, {"loss": 0.25}]}
    weights = get_model_state_dict(model)
    tree = {"model": weights, "optimizer": get_optimizer_state_dict(model, optim), **more}
    dcp.save(tree, checkpoint_id=f"{folder}/tree")
    dcp.save({"model": weights, "optim": flat_optimizer_state(model, optim), **more}, checkpoint_id=f"{folder}/flat")


def test_a_folder_of_lightning_is_complete(store: Path, tmp_path: Path) -> None:
    """Fabric writes what is neither a model nor an optimizer to meta.pt."""
    folder = tmp_path / "lightning"
    run_scenario(Scenario(f"{__name__}:save_with_lightning", 2, {"folder": str(folder)}), tmp_path / "ranks")
    assert sorted(path.name for path in folder.iterdir()) == [
        ".metadata", "__0_0.distcp", "__1_0.distcp", "meta.pt",
    ]  # fmt: skip
    done = take(store, folder)
    assert (done.code, done.json["items"]) == (0, ["meta", "model", "optim"])
    model = make_model(1)
    assert_restores(store, model, make_optimizer(model), "r")
    assert given_back(store)["meta"] == {"global_step": 5, "loops": {"epoch": 2}}


def save_with_lightning(folder: str) -> None:
    import torch.distributed as dist
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    warnings.simplefilter("ignore")
    os.environ |= {"LOCAL_RANK": str(dist.get_rank()), "NODE_RANK": "0"}  # Fabric starts no processes then

    def shard(model: Any, mesh: Any) -> Any:
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh["data_parallel"])
        return model

    strategy = ModelParallelStrategy(shard, 2, 1, process_group_backend="gloo")
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    model = fabric.setup_module(make_model(1))
    optim = fabric.setup_optimizers(make_optimizer(model))
    state = {"state_dict": model, "optimizer_0": optim, "global_step": 5, "loops": {"epoch": 2}}
    fabric.save(folder, state)  # by the names that its Trainer uses


def test_the_plans_that_megatron_keeps_are_passed_over(store: Path, saved: Path) -> None:
    writer, planner = dcp.FileSystemWriter(saved / "plan"), dcp.DefaultSavePlanner()
    planner.set_up_planner({"model": {"w": torch.arange(60.0).reshape(20, 3)}, "step": 5}, is_coordinator=True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    change(saved, lambda metadata: setattr(metadata, "all_local_plans", [plan]))
    torch.save({"args": argparse.Namespace(lr=0.1), "iteration": 7}, saved / "common.pt")
    assert take(store, saved).json["items"] == ["common", "model", "step"]
    assert given_back(store)["common"] == {"args": {"lr": 0.1}, "iteration": 7}


def test_shapes_of_all_kinds_keep_their_bits(store: Path, tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "model": {
            "scalar": torch.tensor(3.5, dtype=torch.bfloat16),
            "empty": torch.zeros(0, 4),
            "flags": torch.tensor([True, False]),
            "transposed": torch.arange(20_000).reshape(100, 200).t(),
            "large": torch.arange(3_000_000, dtype=torch.int32).reshape(-1, 3),
        },
        "list": [torch.ones(2), {"a": torch.zeros(3)}, *range(12)],
        "values": {"text": "x", "none": None, "pair": (1, 2.5), "size": torch.Size([2]), "names": ["a", "b"]},
    }
    assert take(store, save(tmp_path / "dcp", state)).code == 0
    found = given_back(store)
    assert same(found["model"], {**state["model"]})
    assert same(found["list"][0], state["list"][0])
    assert same(found["list"][1], state["list"][1])
    assert (found["list"][2:], found["values"]) == (state["list"][2:], state["values"])


def test_a_flat_state_dict_becomes_a_model(store: Path, tmp_path: Path) -> None:
    model = make_model(1)
    assert take(store, save(tmp_path / "dcp", model.state_dict())).json["items"] == ["model"]
    assert same(given_back(store)["model"], dict(model.state_dict()))


def test_an_export_imports_to_the_same_state(store: Path, tmp_path: Path) -> None:
    model = make_model(1)
    optim = make_optimizer(model)
    torch.save({"model": model.state_dict(), "optimizer": optim.state_dict()}, tmp_path / "a.pt")
    assert take(store, tmp_path / "a.pt").code == 0
    to = tmp_path / "dcp"
    assert invoke("export", "r@1", "--to", to, "--format", "dcp", "--store", store).code == 0
    assert take(store, to, "copy").code == 0
    assert same(given_back(store, "copy"), given_back(store))


def test_nothing_in_the_metadata_is_executed(store: Path, saved: Path, tmp_path: Path) -> None:
    change(saved, lambda metadata: setattr(metadata, "planner_data", Payload(tmp_path / "pwned")))
    error = refused(store, saved)
    assert (error["code"], "posix.mkdir" in error["message"]) == ("unsupported_object", True)
    assert not (tmp_path / "pwned").exists()


def test_nothing_in_a_value_is_executed(store: Path, tmp_path: Path) -> None:
    folder = save(tmp_path / "dcp", {"model": {"w": torch.ones(2)}, "x": Payload(tmp_path / "pwned")})
    assert take(store, folder).json["notes"] == ["x is left out: a posix.mkdir cannot be imported"]
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    "data",
    [
        b"", b"not a pickle", pickle.dumps({"a": 1}), pickle.dumps(Metadata),
        b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81.",
        # attributes set on a class, not on an object of it
        b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\n}\x8c\x01aK\x01sb.",
        b"\x80\x04ctorch\nfloat32\n)R.",
    ],
)  # fmt: skip
def test_metadata_that_is_none_is_damage(store: Path, saved: Path, data: bytes) -> None:
    (saved / ".metadata").write_bytes(data)
    assert refused(store, saved)["code"] == "corrupt"


def key_of(metadata: Metadata, name: str) -> Any:
    return next(key for key in metadata.storage_data if key.fqn == name)


def move(path: str) -> Callable[[Metadata], object]:
    return lambda metadata: setattr(metadata.storage_data[key_of(metadata, "model.w")], "relative_path", path)


def place(**fields: Any) -> Callable[[Metadata], object]:
    return lambda metadata: vars(metadata.storage_data[key_of(metadata, "model.w")]).update(fields)


def tensor(**fields: Any) -> Callable[[Metadata], object]:
    return lambda metadata: vars(metadata.state_dict_metadata["model.w"]).update(fields)


def chunks(*boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> Callable[[Metadata], object]:
    return tensor(chunks=[ChunkStorageMetadata(torch.Size(at), torch.Size(size)) for at, size in boxes])


def paths(**found: Any) -> Callable[[Metadata], object]:
    return lambda metadata: metadata.planner_data.update({name.replace("_", "."): p for name, p in found.items()})


@pytest.mark.parametrize(
    "how",
    [
        move("../secret"), move("/etc/passwd"), move(".."), move(""), move("missing.distcp"),
        place(offset=10), place(offset=-1), place(offset="0"), place(offset=1 << 62), place(length=1 << 40),
        place(length=20), tensor(size=torch.Size([20, 4])), tensor(size=torch.Size([1 << 40, 1 << 20])),
        tensor(size=[-20, -3]), tensor(size="ab"), tensor(properties=None), tensor(chunks=[]), tensor(chunks=None),
        chunks(((0, 0), (10, 3))), chunks(((0,), (20,))), chunks(((0, 0), (21, 3))), chunks(((1, 0), (20, 3))),
        chunks(((0, 0), (1 << 40, 1 << 40))),
        lambda metadata: metadata.storage_data.clear(),
        lambda metadata: setattr(metadata, "storage_data", None),
        lambda metadata: setattr(metadata, "state_dict_metadata", [1]),
        paths(step=("model", "w")), paths(step=("model", "w", "x")), paths(step=()), paths(step=("a", 3)),
        paths(step=("model", 0)),
    ],
)  # fmt: skip
def test_metadata_that_lies_is_damage(store: Path, saved: Path, how: Callable[[Metadata], object]) -> None:
    change(saved, how)
    assert refused(store, saved)["code"] == "corrupt"


def test_files_of_a_rank_that_are_damaged_or_missing_are_damage(store: Path, saved: Path) -> None:
    """Damaged where a tensor is described, too."""
    path = next(saved.glob("*.distcp"))
    data = path.read_bytes()
    for damaged in (data[:-1], data.replace(b"FloatStorage", b"XloatStorage", 1)):
        path.write_bytes(damaged)
        assert refused(store, saved)["code"] == "corrupt"
    path.unlink()
    assert refused(store, saved)["code"] == "corrupt"


def test_an_unfinished_folder_is_refused(store: Path, saved: Path) -> None:
    (saved / ".metadata").unlink()
    assert refused(store, saved)["code"] == "invalid_request"
    done = invoke("import", saved, "r@1", "--store", store, "--format", "dcp", "-o", "json")
    assert (done.code, done.error["code"]) == (5, "corrupt")
    shutil.rmtree(saved)
