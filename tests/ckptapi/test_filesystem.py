from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from safetensors.torch import load

from ckptapi.filesystem import CheckpointFiles
from ckptstore.errors import CorruptObject, InvalidRequest
from ckptstore.names import RunKeys
from ckptstore.stores import open_store
from tests.support.checkpoints import Arrays, flip, write_checkpoint
from tests.support.daemons import running_daemon

ARRAYS: Arrays = {
    "model/emb": np.random.default_rng(0).standard_normal((400, 300)).astype(np.float32),
    "model/bias": np.arange(7, dtype=np.float16),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_checkpoint(open_store(str(tmp_path / "store")), "team/gpt", 1000, ARRAYS)
    return tmp_path / "store"


@pytest.mark.parametrize("through", ["store", "daemon"])
def test_a_checkpoint_is_a_folder_of_files(folder: Path, monkeypatch: pytest.MonkeyPatch, through: str) -> None:
    with running_daemon(f"file://{folder}") as daemon:
        monkeypatch.setenv(*(("CKPT_STORE", str(folder)) if through == "store" else ("CKPTD_URL", daemon.url)))
        path = "ckptd://team/gpt@1000/model.safetensors"
        with fsspec.open(path, skip_instance_cache=True) as file:
            whole = file.read()
            for _ in range(40):
                start, size = random.randrange(len(whole)), random.randrange(9000)
                file.seek(start)
                assert file.read(size) == whole[start : start + size]
        assert np.array_equal(load(whole)["emb"].numpy(), ARRAYS["model/emb"])
        files: Any = CheckpointFiles(dtype="bf16", skip_instance_cache=True)
        assert files.info(path)["size"] == len(files.cat_file(path)) < len(whole)
        assert files.ls("ckptd://team/gpt@latest", detail=False) == ["team/gpt@latest/model.safetensors"]
        assert (files.ls("", detail=False), files.isdir("team/gpt@1000")) == (["team/gpt"], True)
        assert [name.partition(".")[0] for name in files.ls("team/gpt", detail=False)] == ["team/gpt@1000"]
        for missing in ("team/gpt@1000/config.json", "team/gpt@7/model.safetensors"):
            with pytest.raises(FileNotFoundError):
                files.cat_file(missing)
            assert not files.exists(missing)
        with pytest.raises(InvalidRequest):
            files.open(path, "wb")


def test_damage_is_an_error_and_a_file_system_needs_a_store(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files: Any = CheckpointFiles(str(folder), skip_instance_cache=True)
    attempt = files.source.latest("team/gpt").attempt
    flip(folder / RunKeys("team/gpt").shard(attempt, "shard-00000.ckpt"), 5000)
    with pytest.raises(CorruptObject):
        files.cat_file("team/gpt@1000/model.safetensors")
    for name in ("CKPT_STORE", "CKPTD_URL"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InvalidRequest, match="no store or daemon"):
        CheckpointFiles(skip_instance_cache=True)
