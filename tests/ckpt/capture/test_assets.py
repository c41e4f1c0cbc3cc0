from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckpt
from ckpt import Checkpointer
from ckpt.capture.assets import MOST_BYTES, read_files
from ckptstore.commits.catalog import Checkpoint
from ckptstore.errors import InvalidRequest
from ckptstore.reading.assets import asset_files
from ckptstore.reading.source import read_manifest
from tests.ckpt.loops import open_run
from tests.support.command_line import succeed
from tests.support.waiting import present

TOKENIZER = np.random.default_rng(0).integers(0, 256, 10_000_000, np.uint8).tobytes()
FILES = {"config.json": b"{}", "tokenizer.json": TOKENIZER, "templates/x.jinja": b"{{x}}"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What `save_pretrained` writes, and files that do not belong to it."""
    for name, data in {**FILES, ".git/HEAD": b"main", ".hidden": b""}.items():
        (path := tmp_path / "hub" / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path / "hub"


def stored(checkpointer: Checkpointer, checkpoint: Checkpoint) -> dict[str, bytes]:
    """The files of a checkpoint, as readers get them."""
    source = checkpointer._source
    files = asset_files(read_manifest(source, checkpoint).content)
    return {name: b"".join(map(bytes, one.pieces(source, checkpoint, 0, one.bytes))) for name, one in files.items()}


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ("hub", list(FILES)),
        ("hub/config.json", ["config.json"]),
        ("hub/*.json", ["config.json", "tokenizer.json"]),
        (["hub/tok*", "hub/config.json", "hub/c*"], ["config.json", "tokenizer.json"]),
        ({"config.json": "hub/config.json", "templates/x.jinja": FILES["templates/x.jinja"]}, None),
        ((), []),
    ],
)
def test_files_are_found_by_folder_glob_path_and_name(
    folder: Path, given: Any, names: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    assert read_files(given) == {name: FILES[name] for name in (given if names is None else names)}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("hub/tokeniser.json", "tokeniser.json .* is tokenizer.json"),
        ("hub/*.model", "no file hub/.*none like it"),
        ("nowhere/config.json", "no file nowhere/config.json"),
        ("empty", "no file empty"),
        (["hub/config.json", "other/config.json"], "'config.json', or two"),
        ({"../config.json": "hub/config.json"}, "'../config.json'"),
        (["hub", "weights.bin"], "256 MiB.*single files"),
    ],
)
def test_what_cannot_be_saved_is_refused_before_training_begins(
    folder: Path, given: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    for name in ("other", "empty"):
        Path(name).mkdir()
    Path("other/config.json").write_text("[]")
    with open("weights.bin", "wb") as file:
        file.truncate(MOST_BYTES)
    with pytest.raises(InvalidRequest, match=said):
        open_run(folder.parent, assets=given)


@pytest.fixture
def checkpointer(tmp_path: Path, folder: Path) -> Iterator[Checkpointer]:
    with open_run(tmp_path / "store", assets=folder) as found:
        yield found


def test_they_are_stored_once_beside_weights_that_change(checkpointer: Checkpointer, folder: Path) -> None:
    model = nn.Linear(400, 1000)
    saved = []
    for step in range(3):
        nn.init.normal_(model.weight)
        saved.append(checkpointer.save(model, None, step))
        (folder / "config.json").unlink(missing_ok=True)  # the setting's files were read before
    first, *others = (one.stored_bytes for one in saved)
    assert first > len(TOKENIZER)
    assert max(others) < 2_000_000
    assert stored(checkpointer, saved[2]) == FILES
    shown = succeed("show", saved[2].id, "--store", checkpointer.config.source).stdout
    assert "assets      config.json, templates/x.jinja, tokenizer.json" in shown
    assert "assets/tokenizer.json" in shown
    assert succeed("diff", saved[1].id, saved[2].id, "--store", checkpointer.config.source, "-o", "json").json


def test_a_save_may_have_others_and_one_item_has_the_name(checkpointer: Checkpointer) -> None:
    model, own = nn.Linear(2, 2), {"config.json": b"own"}
    assert stored(checkpointer, checkpointer.save(model, None, 1, assets=own)) == own
    assert stored(checkpointer, checkpointer.save_async(model, None, 2, assets=()).result()) == {}
    assert stored(checkpointer, checkpointer.save(model, None, 3)) == FILES
    with pytest.raises(InvalidRequest, match="item 'assets'"):
        checkpointer.save(model, None, 4, shared={"assets": 1})
    with open_run(Path(checkpointer.config.source.removeprefix("file://")) / "own") as other:
        other.save(model, None, 1, shared={"assets": {"heads": torch.arange(3)}})
        assert present(other.restore(shared={"assets": None})).values["assets"]["heads"].tolist() == [0, 1, 2]


def test_restores_need_not_know_of_them(checkpointer: Checkpointer, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 2)
    optim = torch.optim.AdamW(model.parameters())
    checkpointer.save(model, optim, 1)
    assert present(checkpointer.restore(model, optim)).unused == []
    with checkpointer.restore_in_stages() as stages:
        stages.model(model)
        stages.optimizers(optim)
    for step in ckpt.steps(model, optim, 3, checkpointer=checkpointer, assets={"notes.txt": b"x"}):
        assert step == 2
    assert stored(checkpointer, present(checkpointer.latest())) == {"notes.txt": b"x"}
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert present(checkpointer.restore()).values["assets"]["notes.txt"].tobytes() == b"x"
    assert list(checkpointer.load(names="model/*")) == ["model/weight", "model/bias"]


def test_memory_of_slots_is_made_for_them_in_advance(checkpointer: Checkpointer) -> None:
    model = nn.Linear(2, 2)
    checkpointer.prepare(model, None)
    arena = present(checkpointer._saves.client).arena
    assert all(one.num_bytes > len(TOKENIZER) for one in arena.segments.values())


def test_saves_are_described_once_although_they_have_files(checkpointer: Checkpointer) -> None:
    """Otherwise each save would list the addresses of all tensors again."""
    model, seen = nn.Linear(2, 2), list[object]()
    for step, files in enumerate((None, None, {"x": b"1"}, None)):
        checkpointer.save(model, None, step, assets=files)
        seen.append(checkpointer._saves.agreement._placed)
    assert seen[0] is not None
    assert [one is seen[0] for one in seen] == [True, True, False, False]
    last = checkpointer.save(model, None, 9)
    assert stored(checkpointer, last) == FILES
