"""Bad input gets a typed error that names the object and the remedy, and loses nothing."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from ckpt import Checkpointer
from ckptstore.errors import (
    CkptError,
    DaemonUnavailable,
    InvalidName,
    InvalidRequest,
    NoCheckpoint,
    StateMismatch,
    StoreFull,
    StoreReadOnly,
    UnsupportedFormat,
    UnsupportedObject,
)
from ckptstore.format.documents import Outcome, digest
from ckptstore.format.parsing import parse_sealed, seal
from ckptstore.format.records import Policy
from ckptstore.reading.source import StoreSource
from ckptstore.reading.verify import verify
from ckptstore.retention.pruning import apply_prune, plan_prune
from ckptstore.run import Run
from ckptstore.stores import open_store
from tests.support.disks import small_file_system
from tests.support.training import same_state
from tests.support.waiting import present


def test_unreachable_daemon() -> None:
    with Checkpointer("http://127.0.0.1:9", run="r", retry_s=0.2) as checkpointer:
        with pytest.raises(DaemonUnavailable, match=r"127\.0\.0\.1:9"):
            checkpointer.restore(nn.Linear(2, 2))
        with pytest.raises(InvalidRequest, match="daemon"):
            checkpointer.save_async(nn.Linear(2, 2), None, 0)


def test_an_unreachable_daemon_does_not_hinder_saving(tmp_path: Path) -> None:
    with Checkpointer(str(tmp_path), run="r", daemon="http://127.0.0.1:9") as checkpointer:
        assert checkpointer.save(nn.Linear(2, 2), None, 3).step == 3


@pytest.mark.parametrize("step", [-1, 10**12, 1.5, True, "7"])
def test_bad_step(step: object, checkpointer: Checkpointer) -> None:
    with pytest.raises(InvalidName):
        checkpointer.save_async(nn.Linear(2, 2), None, step)  # type: ignore[arg-type]


@pytest.mark.parametrize("call", ["prepare", "restore", "save"])
def test_a_plain_data_loader_is_refused_at_once_with_the_way_out(call: str, tmp_path: Path) -> None:
    loader: DataLoader[int] = DataLoader([1, 2, 3])  # type: ignore[arg-type]
    arguments = (nn.Linear(2, 2), None, *([1] if call == "save" else []))
    with (
        Checkpointer(str(tmp_path), run="r", writer="thread") as checkpointer,
        pytest.raises(UnsupportedObject, match="DataLoader at 'data/0' has no state_dict") as caught,
    ):
        getattr(checkpointer, call)(*arguments, data=[loader])
    assert "ckpt.data.resumable(loader)" in caught.value.hint


def test_extras_that_can_be_saved_are_accepted_by_a_restore(checkpointer: Checkpointer) -> None:
    extras: dict[str, Any] = {"epoch": None, "seen": {"a": [1, 2.5, (3,)]}, "mean": torch.ones(2), "counts": np.ones(3)}
    checkpointer.prepare(nn.Linear(2, 2), None, **extras)
    assert checkpointer.restore(nn.Linear(2, 2), **extras) is None


def test_unsupported_objects_are_named_by_their_path(checkpointer: Checkpointer) -> None:
    for value in (object(), {"a": [lambda: None]}, {"s": torch.zeros(2, 2).to_sparse()}, torch.zeros(1, device="meta")):
        with pytest.raises(UnsupportedObject, match="mine") as caught:
            checkpointer.save_async(nn.Linear(2, 2), None, 0, mine=value)
        assert isinstance(caught.value, TypeError)
        assert caught.value.hint
    assert checkpointer.save(nn.Linear(2, 2), None, 1).step == 1


def test_reserved_names(checkpointer: Checkpointer) -> None:
    with pytest.raises(InvalidRequest, match="rng"):
        checkpointer.save_async(nn.Linear(2, 2), None, 0, rng=1)


def test_strict_restore_reports_every_difference_and_changes_nothing(checkpointer: Checkpointer) -> None:
    saved = nn.ModuleDict({"same": nn.Linear(3, 3), "gone": nn.Linear(2, 2), "shape": nn.Linear(4, 4, bias=False)})
    other = nn.ModuleDict({"same": nn.Linear(3, 3), "new": nn.Linear(2, 2), "shape": nn.Linear(4, 5, bias=False)})
    before = {name: value.clone() for name, value in other.state_dict().items()}
    checkpointer.save(saved, None, 0)
    with pytest.raises(StateMismatch) as caught:
        checkpointer.restore(other, scheduler=None)
    for part in ("model/new.weight", "model/gone.weight", "[4, 4]", "[5, 4]", "scheduler"):
        assert part in str(caught.value)
    assert same_state(dict(other.state_dict()), before)

    restored = present(checkpointer.restore(other, scheduler=None, strict=False))
    assert restored.missing == ["model/new.weight", "model/new.bias", "scheduler"]
    assert restored.unexpected == ["model/gone.bias", "model/gone.weight"]
    assert len(restored.mismatched) == 1
    assert same_state(other["same"].state_dict(), saved["same"].state_dict())
    assert same_state(dict(other["new"].state_dict()), {k[4:]: v for k, v in before.items() if k.startswith("new")})


def test_items_a_training_run_forgets_to_restore_are_logged(
    checkpointer: Checkpointer, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(2, 2)
    optim = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optim, 1)
    checkpointer.save(model, optim, 0, scheduler=scheduler, epoch=3)
    checkpointer.restore(model, optim, scheduler=scheduler, epoch=0)
    checkpointer.restore(model)  # an evaluation
    assert "not restored" not in caplog.text
    checkpointer.restore(model, optim, epoch=0)
    assert "also holds scheduler, not restored" in caplog.text


def test_no_such_checkpoint(checkpointer: Checkpointer) -> None:
    assert checkpointer.restore(nn.Linear(2, 2)) is None
    assert checkpointer.latest() is None
    checkpointer.save(nn.Linear(2, 2), None, 5)
    with pytest.raises(NoCheckpoint, match="step 6"):
        checkpointer.restore(nn.Linear(2, 2), checkpoint=6)


def test_newer_format_is_refused_not_skipped(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with Checkpointer(str(tmp_path), run="r", writer="thread") as checkpointer:
        checkpointer.save(model, None, 1)
        newest = checkpointer.save(model, None, 2)
        path = tmp_path / "r" / "commits" / f"{newest.attempt}.json"
        outcome = parse_sealed(path.read_bytes(), Outcome, "x")
        body = seal(outcome).split(b"\n")[0].replace(b'"format":2', b'"format":99')
        path.write_bytes(body + b'\n{"xxh3_128":"' + digest(body).encode() + b'"}\n')
        with pytest.raises(UnsupportedFormat, match="99"):
            checkpointer.restore(model)


def test_a_diverged_loss_does_not_fail_the_save(checkpointer: Checkpointer, caplog: pytest.LogCaptureFixture) -> None:
    metrics = {"loss": float("nan"), "lr": 0.5, "norm": float("inf")}
    assert checkpointer.save(nn.Linear(2, 2), None, 1, metrics=metrics).metrics == {"lr": 0.5}
    assert "['loss', 'norm']" in caplog.text


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with small_file_system(tmp_path / "small", "24m") as folder:
        yield folder


def test_full_disk_fails_the_save_and_keeps_the_others(small_disk: Path) -> None:
    model = nn.Linear(1024, 1536, bias=False)  # 6 MiB
    with Checkpointer(str(small_disk), run="r", compress="off", max_references=0) as checkpointer:
        committed, failure = [], None
        for step in range(5):
            try:
                committed.append(checkpointer.save(model, None, step))
            except CkptError as error:
                failure = error
                break
        assert isinstance(failure, StoreFull)
        assert "prune" in failure.hint
        assert len(committed) == 3
        store = open_store(str(small_disk))
        assert all(verify(StoreSource(store), checkpoint).ok for checkpoint in committed)
        # What the failed save wrote is gone, so that pruning one checkpoint makes room for the next.
        assert {info.key.split("/")[2] for info in store.list("r/attempts/")} == {str(c.attempt) for c in committed}
        apply_prune(Run(store, "r"), plan_prune(Run(store, "r"), Policy(2)))
        assert checkpointer.save(model, None, 9).step == 9


def test_read_only_folder(small_disk: Path) -> None:
    model = nn.Linear(4, 4)
    with Checkpointer(str(small_disk), run="r", writer="thread") as checkpointer:
        checkpointer.save(model, None, 1)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with Checkpointer(str(small_disk), run="r", writer="thread") as checkpointer:
        assert present(checkpointer.restore(model)).step == 1
        with pytest.raises(StoreReadOnly, match="small"):
            checkpointer.save(model, None, 2)


def test_a_failed_background_save_is_raised_by_the_next_call(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    checkpointer = Checkpointer(str(blocked), run="r")
    handle = checkpointer.save_async(nn.Linear(2, 2), None, 0)
    assert handle._finished.wait(30)
    with pytest.raises(CkptError, match="file"):
        checkpointer.save_async(nn.Linear(2, 2), None, 1)
    assert handle.exception() is not None
    checkpointer.close()
