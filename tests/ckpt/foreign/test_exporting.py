import os
import re
import resource
import sys
import warnings
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from ckpt.foreign.exporting import FileFormat, write_whole, writer_of
from ckpt.foreign.writing import build_state, require_loadable
from ckptstore.codecs.dtypes import ITEM_BYTES
from ckptstore.commits.catalog import list_checkpoints
from ckptstore.errors import CorruptObject, InvalidRequest, UnsupportedObject
from ckptstore.format.columns import column
from ckptstore.format.documents import Content, Entries, Slices
from ckptstore.run import Run
from ckptstore.stores import Store, open_store
from tests.ckpt.foreign.conftest import of_types
from tests.support.checkpoints import Arrays, flip, sample_arrays, write_checkpoint
from tests.support.command_line import invoke
from tests.support.entries import tensor_bytes


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "store")


def test_safetensors_hold_the_same_bits(folder: Path, tmp_path: Path) -> None:
    to = tmp_path / "out.safetensors"
    done = invoke("export", "gpt@40", "--to", to, "--store", folder)
    assert (done.code, done.stderr) == (0, "")
    assert re.fullmatch(rf"Wrote 5 entries of gpt@40\.\w+ to {to} \(2\.7 MiB\)\n", done.stdout)
    found = load_file(to)
    for name, array in sample_arrays(40).items():
        assert tensor_bytes(found.pop(name)) == array.tobytes()
    assert (found, left_in(tmp_path)) == ({}, ["out.safetensors"])
    assert to.stat().st_mode & 0o777 == 0o666 & ~_umask()


def test_a_torch_file_holds_the_state_as_it_was_saved(training: Path, tmp_path: Path) -> None:
    to = tmp_path / "out.pt"
    assert invoke("export", "r@1", "--to", to, "--store", training).code == 0
    state = torch.load(to, weights_only=True)
    assert (list(state), state["model"]["emb"].dtype) == (["model", "optim", "scheduler"], torch.bfloat16)
    assert state["model"]["emb"].data_ptr() == state["model"]["head"].data_ptr()
    assert (state["model"]["bias"].dtype, state["optim"]["state"][0]["t"]) == (torch.float64, 3)
    assert (state["optim"]["state"][0]["m"].shape, state["optim"]["betas"][0]) == ((0, 4), 0.9)
    assert state["optim"]["betas"][1].shape == ()
    assert state["scheduler"] == {
        "last": float("inf"), "size": torch.Size([2, 3]), "type": torch.bfloat16, "milestones": Counter({30: 1}),
        "order": OrderedDict(b=b"\0\1"), "number": 7,
    }  # fmt: skip


@pytest.mark.parametrize("mmap", [False, True])
def test_every_element_type_keeps_its_bits_in_a_torch_file(store: Path, tmp_path: Path, mmap: bool) -> None:
    raw = of_types(store, [dtype for dtype in ITEM_BYTES if hasattr(torch, dtype)])
    assert invoke("export", "r@1", "--to", tmp_path / "a.pt", "--store", store).code == 0
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="ComplexHalf support is experimental")
        state = torch.load(tmp_path / "a.pt", weights_only=True, mmap=mmap)["model"]
    for dtype, data in raw.items():
        assert (state[dtype].dtype, state[dtype].shape) == (getattr(torch, dtype), (3, 5))
        assert bytes(state[dtype].untyped_storage()) == data


@pytest.mark.parametrize("dtype", ["complex128", "complex32"])
def test_an_element_type_that_safetensors_lacks_is_named(store: Path, tmp_path: Path, dtype: str) -> None:
    of_types(store, [dtype])
    done = invoke("export", "r@1", "--to", tmp_path / "a.safetensors", "--store", store, "-o", "json")
    assert (done.code, done.error["code"]) == (2, "unsupported_object")
    assert f"'model/{dtype}' has type {dtype}" in done.error["message"]
    assert left_in(tmp_path) == []


def test_files_of_the_model_are_no_tensors(store: Path, tmp_path: Path) -> None:
    arrays: Arrays = {"model/w": np.ones(3, np.float32), "assets/config.json": np.frombuffer(b"{}", np.uint8)}
    write_checkpoint(open_store(str(store)), "r", 1, arrays)
    for name in ("a.safetensors", "a.pt", "hub"):
        how = ("--format", "huggingface") if name == "hub" else ()
        assert invoke("export", "r@1", "--to", tmp_path / name, "--store", store, *how).code == 0
    assert list(load_file(tmp_path / "a.safetensors")) == ["model/w"]
    assert list(torch.load(tmp_path / "a.pt", weights_only=True)) == ["model"]
    assert {path.name: path.read_bytes()[-2:] for path in (tmp_path / "hub").iterdir()}["config.json"] == b"{}"


def test_tied_weights_are_in_a_safetensors_file_once(training: Path, tmp_path: Path) -> None:
    to = tmp_path / "out.safetensors"
    assert invoke("export", "r@1", "--to", to, "--store", training).code == 0
    with safe_open(to, "pt") as file:
        assert sorted(file.keys()) == ["model/bias", "model/emb", "optim/beta", "optim/m"]
        metadata = file.metadata()
    assert (metadata["model/head"], metadata["format"]) == ("model/emb", "pt")
    assert metadata["checkpoint"].startswith("r@1.")


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("model/*", {"model": {"emb", "head", "bias"}}),
        ("model/head", {"model": {"emb", "head"}}),
        ("optim/m", {"optim": {"state", "betas"}}),
        ("sched*", {"scheduler": {"last", "size", "type", "milestones", "order", "number"}}),
    ],
)
def test_a_part_can_be_exported(training: Path, tmp_path: Path, pattern: str, expected: dict[str, set[str]]) -> None:
    to = tmp_path / "part.pt"
    assert invoke("export", "r@1", "--to", to, "--names", pattern, "--store", training).code == 0
    assert {item: set(tree) for item, tree in torch.load(to, weights_only=True).items()} == expected


def test_what_is_left_out_of_a_tuple_is_none_and_out_of_a_dict_is_missing(training: Path, tmp_path: Path) -> None:
    to = tmp_path / "part.pt"
    assert invoke("export", "r@1", "--to", to, "--names", "optim/m", "--store", training).code == 0
    assert torch.load(to, weights_only=True)["optim"]["betas"] == (0.9, None)
    assert invoke("export", "r@1", "--to", to, "--names", "optim/b*", "--store", training, "--force").code == 0
    assert torch.load(to, weights_only=True)["optim"]["state"] == {0: {"t": 3}}


def test_the_format_follows_the_suffix_or_is_given(folder: Path, tmp_path: Path) -> None:
    done = invoke("export", "gpt@40", "--to", tmp_path / "out.bin", "--store", folder)
    assert (done.code, "--format" in done.stderr) == (2, True)
    done = invoke(
        "export", "gpt@40", "--to", tmp_path / "out.bin", "--format", "torch", "--store", folder, "-o", "json"
    )
    assert done.json["format"] == "torch"
    assert done.json["file_bytes"] == (tmp_path / "out.bin").stat().st_size
    assert set(torch.load(tmp_path / "out.bin", weights_only=True)["model"]) == {
        name.removeprefix("model/") for name in sample_arrays(40)
    }


def test_a_file_that_is_there_is_replaced_only_by_force(folder: Path, tmp_path: Path) -> None:
    to = tmp_path / "out.safetensors"
    to.write_text("precious")
    assert invoke("export", "gpt@40", "--to", to, "--store", folder).code == 2
    assert to.read_text() == "precious"
    assert invoke("export", "gpt@40", "--to", to, "--store", folder, "--force").code == 0
    assert len(load_file(to)) == 5


def test_a_target_or_pattern_that_cannot_be_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "dir.pt").mkdir()
    for to, names in (("dir.pt", "*"), ("nowhere/x.pt", "*"), ("x.pt", "modle/*")):
        assert invoke("export", "gpt@40", "--to", tmp_path / to, "--names", names, "--store", folder).code == 2
    assert left_in(tmp_path) == ["dir.pt"]


def test_damage_leaves_no_file_and_the_old_one_as_it_was(folder: Path, filled: Store, tmp_path: Path) -> None:
    run = Run(filled, "gpt")
    newest = list_checkpoints(run)[0]
    shard = folder / run.keys.shard(newest.attempt, "shard-00000.ckpt")
    flip(shard, -1)
    old = tmp_path / "old.pt"
    old.write_text("precious")
    for to in (old, tmp_path / "new.safetensors"):
        done = invoke("export", newest.id, "--to", to, "--force", "--store", folder, "-o", "json")
        assert (done.code, done.error["code"]) == (5, "corrupt")
    assert (left_in(tmp_path), old.read_text()) == (["old.pt"], "precious")


def test_whatever_stops_the_writing_leaves_nothing(tmp_path: Path) -> None:
    def stopped(path: Path) -> None:
        path.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "x.pt", FileFormat.TORCH, False, stopped)
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_an_error_of_the_file_system_is_reported_plainly(folder: Path, tmp_path: Path, kind: str) -> None:
    args = ("export", "gpt@40", "--to", tmp_path / "x", "--format", kind, "--store", folder, "-o", "json")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        done = invoke(*args)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (done.code, done.error["code"]) == (1, "not_written")
    assert "File too large" in done.error["message"]
    assert left_in(tmp_path) == []


def test_a_missing_torch_is_reported_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ckpt.foreign.writing", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(InvalidRequest, match=r"package torch.*pip install 'ckptd\["):
        writer_of(FileFormat.TORCH, 1)


def content(**trees: Any) -> Content:
    """Without entries."""
    slices = Slices(entry=column(), shard=column(), at=column(), box=column())
    return Content(shards=[], entries=Entries(name=[], dtype=[], shape=[]), slices=slices, aliases={}, trees=trees)


def test_what_weights_only_refuses_is_never_written() -> None:
    with pytest.raises(UnsupportedObject, match=r"builtins\.frozenset"):
        require_loadable(content(user={"x": {"$": "frozenset", "v": [1]}}), ["user"])


def test_a_tree_that_names_no_entry_is_damage() -> None:
    with pytest.raises(CorruptObject, match="not an entry"):
        build_state(content(model={"x": {"$": "tensor", "name": "model/x"}}), ["model"], {})


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
