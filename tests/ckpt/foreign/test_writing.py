import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ckptstore.codecs.dtypes import ITEM_BYTES
from ckptstore.commits.catalog import list_checkpoints
from ckptstore.format.shards import Slice
from ckptstore.run import Run
from ckptstore.stores import Store, open_store
from tests.ckpt.foreign.conftest import of_types
from tests.ckpt.loops import open_run
from tests.support.checkpoints import sample_arrays
from tests.support.command_line import clean_environment, invoke
from tests.support.disks import small_file_system
from tests.support.entries import tensor_bytes, write_entries
from tests.support.forking import TRAINER, fork
from tests.support.training import same_state
from tests.support.waiting import wait_until


def load_dcp(folder: Path, state: dict[str, Any]) -> None:
    """What dcp.load does in a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)  # type: ignore[attr-defined]


def export(folder: Path, reference: str, to: Path, kind: str, *more: object) -> int:
    return invoke("export", reference, "--to", to, "--format", kind, "--store", folder, *more).code


def test_a_hugging_face_folder_has_an_index_and_files_of_bounded_size(folder: Path, tmp_path: Path) -> None:
    to = tmp_path / "hf"
    assert export(folder, "gpt@40", to, "huggingface", "--max-shard-size", "1MB") == 0
    index = json.loads((to / "model.safetensors.index.json").read_text())
    arrays = {name.removeprefix("model/"): array for name, array in sample_arrays(40).items()}
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in arrays.values())
    assert set(index["weight_map"].values()) == {f"model-{n:05d}-of-00003.safetensors" for n in (1, 2, 3)}
    assert {path.name for path in to.iterdir()} == {*index["weight_map"].values(), "model.safetensors.index.json"}
    for name, array in arrays.items():
        with safe_open(to / index["weight_map"][name], "pt") as file:
            assert tensor_bytes(file.get_tensor(name)) == array.tobytes()
            assert file.metadata()["format"] == "pt"
    small = [load_file(to / f"model-{n:05d}-of-00003.safetensors") for n in (1, 3)]
    assert all(sum(t.nbytes for t in tensors.values()) <= 10**6 for tensors in small)


def test_a_small_model_is_one_file_without_an_index_with_tied_weights_once(training: Path, tmp_path: Path) -> None:
    to = tmp_path / "hf"
    assert export(training, "r@1", to, "huggingface") == 0
    assert [path.name for path in to.iterdir()] == ["model.safetensors"]
    with safe_open(to / "model.safetensors", "pt") as file:
        assert (sorted(file.keys()), file.metadata()) == (["bias", "emb"], {"format": "pt", "head": "emb"})


def test_another_item_can_be_the_model(training: Path, tmp_path: Path) -> None:
    assert export(training, "r@1", tmp_path / "hf", "huggingface", "--names", "optim/*") == 0
    assert set(load_file(tmp_path / "hf" / "model.safetensors")) == {"m", "beta"}


@pytest.mark.parametrize(("more", "said"), [(("--names", "*"), "holds one model"), (("--max-shard-size", "5"), "size")])
def test_what_makes_no_model_is_refused(training: Path, tmp_path: Path, more: tuple[str, str], said: str) -> None:
    args = ("export", "r@1", "--to", tmp_path / "hf", "--format", "huggingface", "--store", training)
    done = invoke(*args, *more)
    assert (done.code, said in done.stderr) == (2, True)
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize("kind", ["huggingface", "dcp"])
def test_a_folder_that_is_there_is_never_replaced(training: Path, tmp_path: Path, kind: str) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "precious").touch()
    assert export(training, "r@1", tmp_path / "there", kind, "--force") == 2
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["precious"]


def test_a_dcp_folder_holds_the_state_as_it_was_saved(training: Path, tmp_path: Path) -> None:
    assert export(training, "r@1", tmp_path / "dcp", "dcp") == 0
    assert export(training, "r@1", tmp_path / "same.pt", "torch") == 0
    expected = torch.load(tmp_path / "same.pt", weights_only=True)
    state: dict[str, Any] = {
        "model": {name: torch.zeros_like(tensor) for name, tensor in expected["model"].items()},
        "optim": {"state": {"0": {"m": torch.zeros(0, 4, dtype=torch.float8_e5m2), "t": 0}}, "betas": None},
        "scheduler": {"last": 0.0, "size": None, "type": None, "number": 0},
    }
    load_dcp(tmp_path / "dcp", state)
    for name, tensor in expected["model"].items():
        assert tensor_bytes(state["model"][name]) == tensor_bytes(tensor)
    assert (state["optim"]["state"]["0"]["t"], state["optim"]["betas"]) == (3, expected["optim"]["betas"])
    assert state["scheduler"] == {name: expected["scheduler"][name] for name in state["scheduler"]}


def test_every_element_type_keeps_its_bits_in_a_dcp_folder(store: Path, tmp_path: Path) -> None:
    # Loading makes any true byte of a bool a one: these bytes are random.
    dtypes = [dtype for dtype in ITEM_BYTES if dtype != "bool" and hasattr(torch, dtype)]
    raw = of_types(store, dtypes)
    assert export(store, "r@1", tmp_path / "dcp", "dcp") == 0
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="ComplexHalf support is experimental")
        model = {dtype: torch.zeros(3, 5, dtype=getattr(torch, dtype)) for dtype in dtypes}
        load_dcp(tmp_path / "dcp", {"model": model})
    assert {name: bytes(tensor.untyped_storage()) for name, tensor in model.items()} == raw


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        *((kind, 900_000) for kind in ("safetensors", "torch", "huggingface", "dcp")),
        *((kind, 400_000) for kind in ("torch", "dcp")),  # there is room for the bytes once
    ],
)
def test_a_full_disk_leaves_nothing_and_is_reported(training: Path, tmp_path: Path, kind: str, numbers: int) -> None:
    write_entries(open_store(str(training)), [Slice.whole("model/w", "float32", (numbers,))], {
        "model": {"w": {"$": "tensor", "name": "model/w"}}}, {})  # fmt: skip
    with small_file_system(tmp_path / "disk", "2m") as disk:
        done = invoke("export", "r@1", "--to", disk / "x", "--format", kind, "--store", training, "-o", "json")
        assert (done.code, done.error["code"]) == (1, "not_written")
        assert "No space left on device" in done.error["message"]
        assert list(disk.iterdir()) == []


@pytest.mark.parametrize("kind", ["safetensors", "torch", "huggingface", "dcp"])
def test_a_killed_export_leaves_nothing_under_its_name(folder: Path, filled: Store, tmp_path: Path, kind: str) -> None:
    run = Run(filled, "gpt")
    newest = list_checkpoints(run)[0]
    shard = folder / run.keys.shard(newest.attempt, "shard-00000.ckpt")
    shard.unlink()
    os.mkfifo(shard)  # opening it blocks
    to = tmp_path / "out" / "x"
    to.parent.mkdir()
    arguments = ["export", newest.id, "--to", str(to), "--format", kind, "--store", str(folder)]
    process = fork(TRAINER, "ckptctl", arguments, stdout=1, stderr=2, environment=clean_environment())
    try:
        wait_until(lambda: list(to.parent.iterdir()), "the start of the export")
    finally:
        process.kill()
        process.wait()
    assert not to.exists()
    shard.unlink()


def test_an_average_is_exported_by_the_names_of_the_model(store: Path, tmp_path: Path) -> None:
    model, plain = (nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)) for _ in range(2))
    average: Any = get_ema_multi_avg_fn(0.9)  # type: ignore[no-untyped-call]
    ema = AveragedModel(model, multi_avg_fn=average, use_buffers=True)
    for _ in range(2):
        nn.init.normal_(next(model.parameters()))
        ema.update_parameters(model)
    with open_run(store) as checkpointer:
        checkpointer.save(model, None, 1, ema=ema)
    assert export(store, "r@1", tmp_path / "hf", "huggingface", "--names", "ema/module.*") == 0
    plain.load_state_dict(load_file(tmp_path / "hf" / "model.safetensors"))
    assert same_state(plain.state_dict(), ema.module.state_dict())
    assert not same_state(plain.state_dict(), model.state_dict())
