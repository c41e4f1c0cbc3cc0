"""Restore: falling back from a corrupt checkpoint, leases, reading without a model, the module functions."""

from __future__ import annotations

import contextlib
import gc
import logging
import pydoc
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import ckpt
from ckpt import Checkpointer
from ckpt.ranks.world import World
from ckpt.restoring.pipeline import Together, gc_paused
from ckptstore import names
from ckptstore.clock import system_clock
from ckptstore.commits.catalog import Checkpoint, list_checkpoints
from ckptstore.commits.labels import LabelChange
from ckptstore.commits.leases import active_leases
from ckptstore.errors import (
    CheckpointHeld,
    CkptError,
    CorruptObject,
    InvalidRequest,
    NoCheckpoint,
    ObjectMissing,
    StateMismatch,
)
from ckptstore.format.records import Policy
from ckptstore.names import Attempt, RunKeys, new_ulid
from ckptstore.operator import StoreOperator
from ckptstore.reading.source import StoreSource
from ckptstore.retention.deletion import delete_checkpoint
from ckptstore.retention.pruning import plan_prune
from ckptstore.run import Run
from ckptstore.stores import open_store
from tests.ckpt.data.trained import Samples
from tests.ckpt.loops import open_run
from tests.support.checkpoints import flip, write_rank
from tests.support.forking import TRAINER, run
from tests.support.parallel.runner import Outcome, Scenario, run_named
from tests.support.training import same_state, seed_all
from tests.support.waiting import present, wait_until


def save_steps(folder: Path, count: int) -> tuple[list[Checkpoint], list[dict[str, torch.Tensor]]]:
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    states, checkpoints = [], []
    with open_run(folder) as checkpointer:
        for step in range(count):
            nn.init.normal_(model.weight)
            checkpoints.append(checkpointer.save(model, None, step))
            states.append({name: value.clone() for name, value in model.state_dict().items()})
    return checkpoints, states


def files_of(folder: Path, checkpoint: Checkpoint) -> dict[str, Path]:
    run, attempt = checkpoint.run, checkpoint.attempt
    return {
        "shard": folder / RunKeys(run).shard(attempt, names.shard_name(0)),
        "receipt": folder / RunKeys(run).receipt(attempt, 0),
        "manifest": folder / RunKeys(run).manifest(attempt),
        "outcome": folder / RunKeys(run).outcome(attempt),
    }


def test_a_first_restore_does_not_import_masked_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """np.unique does so when it is first called, and that takes longer than the rest of a small restore."""
    tensors = {"large": torch.arange(30_000.0)}
    with open_run(tmp_path) as checkpointer:
        checkpointer.save(None, None, 1, own=tensors)
        monkeypatch.setattr(np, "ma", None)
        restored = present(checkpointer.restore(own={"large": torch.zeros(30_000)}))
    assert torch.equal(restored.values["own"]["large"], tensors["large"])


def test_a_default_device_is_not_where_bytes_arrive(tmp_path: Path) -> None:
    """Of a script that makes tensors on another device by default; "meta" has no memory, so any use of it shows."""
    weight, empty = torch.rand(40, 60), torch.empty(0, 3)
    first, other = nn.Module(), nn.Module()
    first.weight, other.weight = nn.Parameter(weight.t()), nn.Parameter(torch.zeros(40, 60).t())
    first.none, other.none = nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(0))
    with torch.device("meta"), open_run(tmp_path) as checkpointer:
        checkpointer.save(first, None, 0, extra={"empty": empty, "weight": weight})
        restored = present(checkpointer.restore(other, None, extra=None))
    assert torch.equal(other.weight, first.weight)
    assert torch.equal(restored.values["extra"]["weight"], weight)
    assert restored.values["extra"]["empty"].shape == (0, 3)


@pytest.mark.parametrize("victim", ["shard", "receipt", "manifest", "outcome", "missing shard"])
def test_a_corrupt_newest_checkpoint_is_skipped(victim: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints, states = save_steps(tmp_path, 3)
    path = files_of(tmp_path, checkpoints[2])[victim.removeprefix("missing ")]
    path.unlink() if "missing" in victim else flip(path, 100)
    model = nn.Linear(64, 64)
    with open_run(tmp_path) as checkpointer:
        restored = present(checkpointer.restore(model))
        assert (restored.step, [identity for identity, _ in restored.skipped]) == (1, [checkpoints[2].id])
        assert same_state(dict(model.state_dict()), states[1])
        assert checkpoints[2].id in caplog.text
        # A restore of the corrupt one by name raises the error, not another checkpoint.
        with pytest.raises(CorruptObject):
            checkpointer.restore(model, checkpoint=2)
        if "missing" in victim:
            with pytest.raises(ObjectMissing):
                checkpointer.load(2)


def test_no_good_checkpoint_left_is_an_error_not_a_fresh_start(tmp_path: Path) -> None:
    checkpoints, _ = save_steps(tmp_path, 2)
    for checkpoint in checkpoints:
        flip(files_of(tmp_path, checkpoint)["shard"], 100)
    with open_run(tmp_path) as checkpointer, pytest.raises(CorruptObject, match="none of the 2"):
        checkpointer.restore(nn.Linear(64, 64))


def test_an_undecided_attempt_with_a_hostile_receipt_does_not_stop_a_restore(tmp_path: Path) -> None:
    (checkpoint,), (state,) = save_steps(tmp_path, 1)
    write_rank(open_store(str(tmp_path)), "r", Attempt(2, new_ulid(system_clock())), {}, world_size=2**40)
    model = nn.Linear(64, 64)
    with open_run(tmp_path) as checkpointer:
        restored = present(checkpointer.restore(model))
    assert restored.step == checkpoint.step
    assert same_state(dict(model.state_dict()), state)


def save_with_and_without_extra_layer(folder: Path) -> list[Checkpoint]:
    saved: list[Checkpoint] = []
    for step, layers in enumerate((2, 3)):
        with open_run(folder) as checkpointer:
            if saved:
                checkpointer.restore(deep(layers), strict=False)  # so that it continues from the first one
            saved.append(checkpointer.save(deep(layers), None, step))
    return saved


def deep(layers: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers)))


@pytest.mark.parametrize("strict", [True, False])
def test_an_older_checkpoint_that_does_not_fit_after_a_damaged_one_is_a_mixture(strict: bool, tmp_path: Path) -> None:
    saved = save_with_and_without_extra_layer(tmp_path)
    flip(files_of(tmp_path, saved[1])["shard"], 100)
    with (
        open_run(tmp_path) as checkpointer,
        pytest.raises(
            CorruptObject, match=f"{saved[1].id} cannot be read to the end, and {saved[0].id}.*2.weight"
        ) as e,
    ):
        checkpointer.restore(deep(3), strict=strict)
    assert "must not be trained on" in e.value.hint
    assert "nothing was changed" not in f"{e.value.message} {e.value.hint}"


def test_what_both_checkpoints_lack_is_missing_after_a_damaged_one(tmp_path: Path) -> None:
    checkpoints, states = save_steps(tmp_path, 2)
    flip(files_of(tmp_path, checkpoints[1])["shard"], 100)
    model = nn.Linear(64, 64)
    model.register_buffer("further", torch.full((3,), 7.0))
    with open_run(tmp_path) as checkpointer:
        restored = present(checkpointer.restore(model, strict=False))
    assert (restored.step, restored.missing) == (0, ["model/further"])
    assert same_state(dict(model.state_dict()), {**states[0], "further": torch.full((3,), 7.0)})


def test_an_older_one_that_does_not_fit_is_a_mismatch_if_nothing_was_read_of_the_damaged_one(tmp_path: Path) -> None:
    saved = save_with_and_without_extra_layer(tmp_path)
    flip(files_of(tmp_path, saved[1])["manifest"], 100)
    model = deep(3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with open_run(tmp_path) as checkpointer:
        with pytest.raises(StateMismatch, match=r"model/2\.weight") as caught:
            checkpointer.restore(model)
        restored = present(checkpointer.restore(deep(3), strict=False))
    assert "nothing was changed" in caught.value.hint
    assert same_state(dict(model.state_dict()), before)
    assert restored.missing == ["model/2.weight", "model/2.bias"]


def test_what_a_live_run_resumed_from_is_not_pruned_until_it_commits_or_ends(tmp_path: Path) -> None:
    save_steps(tmp_path, 3)
    run, model = Run(open_store(str(tmp_path)), "r"), nn.Linear(64, 64)
    for saves in (False, True):
        with open_run(tmp_path) as checkpointer:
            checkpointer.restore(model, checkpoint=0)
            reasons = {v.checkpoint.step: v.reasons for v in plan_prune(run, Policy(1)).decisions}
            assert reasons[0][0].startswith("lease:restore:")
            assert reasons[1] == ()
            if saves:
                checkpointer.save(model, None, 7)
        assert active_leases(run) == {}


@pytest.fixture
def default_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("CKPT_STORE", str(tmp_path))
    monkeypatch.setenv("CKPT_RUN", "from-environment")
    yield tmp_path
    ckpt.close()


def test_module_functions_on_the_environment(default_run: Path) -> None:
    model = nn.Linear(4, 4)
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert ckpt.latest() is None
    assert ckpt.restore(model, optim) is None
    handle = ckpt.save_async(model, optim, 1, metrics={"loss": 0.5})
    ckpt.wait()
    assert handle.done()
    assert handle.result(0).metrics == {"loss": 0.5}
    assert handle.progress == (handle.timings.raw_bytes, handle.timings.raw_bytes)
    assert ckpt.save(model, optim, 2).step == 2
    latest = present(ckpt.latest())
    assert latest.id == f"from-environment@2.{latest.attempt.ulid}"
    assert ckpt.load(names="model/w*").keys() == {"model/weight"}
    loaded = ckpt.load(f"{default_run}/from-environment@1", names="model/*")
    assert torch.equal(loaded["model/weight"], model.weight)
    assert ckpt.load(f"file://{default_run}/from-environment@latest").keys() >= {"model/weight", "model/bias"}


def test_a_colleague_needs_only_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 1)
    with Checkpointer(str(tmp_path), run="gpt", writer="thread", max_references=0) as trainer:
        for step, loss in ((1, 0.5), (2, 0.25), (3, 0.75)):
            trainer.save(model, None, step, metrics={"val/loss": loss})
    operator = StoreOperator(open_store(str(tmp_path)))
    operator.label(operator.checkpoints("gpt")[2], LabelChange({"prod": ""}))
    monkeypatch.setenv("CKPT_STORE", str(tmp_path))
    assert ckpt.runs() == ["gpt"]
    found = ckpt.checkpoints("gpt")
    assert ([c.step for c in found], repr(found[0])) == ([3, 2, 1], f"<Checkpoint {found[0].id} committed>")
    assert (found.best("val/loss").step, found.best("val/loss", "max").step) == (2, 3)
    assert found._repr_html_().count("<tr>") == 4
    for name in ("gpt@1", "gpt@prod", "gpt@best:val/loss:min", f"{tmp_path}/gpt@best:val/loss:max"):
        assert torch.equal(ckpt.load(name)["model/weight"], model.weight)
    with Checkpointer(str(tmp_path), run="other", writer="thread") as other:
        assert other.load("gpt@prod").keys() == {"model/weight", "model/bias"}
        with pytest.raises(NoCheckpoint, match="no checkpoint named 'prod'"):
            other.load("prod")
    with Checkpointer(str(tmp_path), run="gpt", writer="thread") as trainer:
        assert present(trainer.restore(model, checkpoint="best:val/loss:min")).step == 2
    with pytest.raises(CheckpointHeld):
        ckpt.delete(ckpt.checkpoints("gpt")[0])
    ckpt.delete("gpt@prod", reason="old")
    assert [c.step for c in ckpt.checkpoints("gpt")] == [3, 2]


def test_a_save_and_a_restore_are_one_line_each(default_run: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(4, 4)
    with caplog.at_level(logging.INFO, "ckpt"):
        handle = ckpt.save_async(model, None, 1)
        ckpt.wait()
        restored = ckpt.restore(model)
    id = handle.result(0).id
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert [line.split(":")[0] for line in lines if "committed" in line] == [
        f"run from-environment step 1 is committed as {id}"
    ]
    assert [line for line in lines if line.startswith("restored")] == [f"restored {restored}"]
    assert re.fullmatch(rf"{re.escape(id)}, [0-9.]+ (B|KiB) in [0-9.]+ s", str(restored))
    assert str(handle) == "<SaveHandle step=1 committed>"


def test_the_help_of_the_module_functions_has_signature_and_text() -> None:
    for name, words in (
        ("save_async", ("step: int", "Copy the state to host memory")),
        ("init", ("slots: int", "CKPT_STORE")),
    ):
        text = pydoc.plain(pydoc.render_doc(getattr(ckpt, name))).replace("'", "")  # of types, before Python 3.14
        assert all(word in text for word in words), text


@pytest.mark.parametrize("writer", ["process", "thread"])
def test_saves_are_durable_at_interpreter_exit(writer: str, tmp_path: Path) -> None:
    program = (
        "import torch, ckpt\n"
        f"ckpt.init('store', run='r', writer={writer!r})\n"
        "ckpt.save_async(torch.nn.Linear(2000, 2000), None, 3)\n"
    )
    (tmp_path / "program.py").write_text(program)
    code, _, errors = run(TRAINER, "tests.docs.program", [str(tmp_path), "program.py"], strict=True)
    assert code == 0, errors
    assert StoreSource(open_store(str(tmp_path / "store"))).latest("r").step == 3


def test_a_store_in_memory() -> None:
    model = nn.Linear(64, 64)
    with Checkpointer("memory://restore-test/a", run="r", writer="thread", compress="off") as checkpointer:
        handles = [checkpointer.save_async(model, None, step) for step in range(4)]
        assert [handle.result(30).step for handle in handles] == [0, 1, 2, 3]
        assert checkpointer.saver_pid is None
        other = nn.Linear(64, 64)
        checkpointer.restore(other)
    assert same_state(dict(other.state_dict()), dict(model.state_dict()))


_RANKS = f"{__name__}:"
_FAILING: dict[str, dict[str, list[Any]]] = {
    "none": {},
    "the earliest step": {"0": [2, "unfit"], "1": [1, "damaged"]},
    "no other checkpoint helps": {"0": [1, "damaged"], "1": [1, "unfit"]},
    "deleted meanwhile": {"0": [2, "deleted"], "1": [1, "damaged"]},
    "unfit before it was deleted": {"0": [2, "deleted"], "1": [1, "unfit"]},
    "a bug": {"1": [0, "bug"]},
    "in the choice": {"0": [3, "damaged"]},
}
_MODES = ("auto", "broadcast")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[object, Outcome]:
    folder = tmp_path_factory.mktemp("together")
    two, one = ({"store": str(folder / name)} for name in ("two", "one"))
    scenarios: dict[object, Scenario] = {
        "save": Scenario(f"{_RANKS}save", 2, two),
        "save alone": Scenario(f"{_RANKS}save", 1, one),
        "same": Scenario(f"{_RANKS}restore", 2, two | {"replica_reads": "auto"}),
        "other": Scenario(f"{_RANKS}restore", 2, one | {"replica_reads": "auto"}),
        "exchange": Scenario(f"{_RANKS}restore", 2, two | {"replica_reads": "broadcast"}),
    }
    for mode in _MODES:
        scenarios[mode] = Scenario(f"{_RANKS}restore_deleted", 2, {"store": str(folder / mode), "replica_reads": mode})
    for name, failing in _FAILING.items():
        scenarios[name] = Scenario(f"{_RANKS}fail", 2, {"failing": failing})
    return run_named(scenarios, folder / "ranks")


@pytest.mark.parametrize(
    ("name", "meetings"),
    [
        # Choose, prepare, fetch, place.
        ("same", 4),
        # The items of all saved ranks are shared out.
        ("other", 5),
        # Protect the checkpoint; then the manifest goes from rank 0 to all, and so do the ranks' needs, in two.
        ("exchange", 8),
    ],
)
def test_a_restore_meets_a_few_times(outcomes: dict[object, Outcome], name: str, meetings: int) -> None:
    for result in outcomes[name].result():
        assert result == {"meetings": meetings, "values": [7.0] * 3}


def test_all_ranks_get_all_reports_and_what_rank_0_chooses(outcomes: dict[object, Outcome]) -> None:
    for rank, result in enumerate(outcomes["none"].result()):
        assert (result["answers"], result["result"], result["chosen"]) == ([[0], [1]], "first", rank == 0)
        assert result["later"] == [[0, 1], "again"]


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("the earliest step", "corrupt", "damaged on rank 1"),
        ("no other checkpoint helps", "state_mismatch", "unfit on rank 1"),
        ("deleted meanwhile", "no_checkpoint", "deleted on rank 0"),
        ("unfit before it was deleted", "state_mismatch", "unfit on rank 1"),
        ("a bug", "restore_failed", "rank 1 cannot restore: ValueError('bug on rank 1')"),
        ("in the choice", "corrupt", "damaged on rank 0"),
    ],
)
def test_one_error_is_raised_on_all_ranks(outcomes: dict[object, Outcome], name: str, code: str, message: str) -> None:
    for rank, result in enumerate(outcomes[name].result()):
        assert (result["code"], result["message"]) == (code, message)
        assert result["chosen"] == (name == "in the choice" and rank == 0)
        assert result["later"] == [[0, 1], "again"]


@pytest.mark.parametrize("mode", _MODES)
def test_what_a_deleted_checkpoint_lacks_is_not_damage(outcomes: dict[object, Outcome], mode: str) -> None:
    for result in outcomes[mode].result():
        assert result["code"] == "no_checkpoint"
        assert "is being deleted" in result["message"]


@gc_paused()
def is_searching(fail: bool = False) -> bool:
    if fail:
        raise CorruptObject("damaged")
    return gc.isenabled()


def test_searches_rest_until_the_call_ends_and_go_on_if_they_did_before() -> None:
    assert [is_searching(), gc.isenabled(), is_searching()] == [False, True, False]
    with pytest.raises(CorruptObject):
        is_searching(fail=True)
    assert gc.isenabled()
    gc.disable()
    try:
        assert [is_searching(), gc.isenabled()] == [False, False]
    finally:
        gc.enable()


def trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    seed_all(seed)
    model = nn.Linear(3, 2)
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(3)).sum().backward()
    optim.step()
    return model, optim


def leases(folder: Path) -> int:
    return sum(1 for _ in open_store(str(folder)).list(Run(open_store(str(folder)), "r").keys.leases))


def test_objects_are_restored_as_they_are_built(tmp_path: Path) -> None:
    model, optim = trained(0)
    batches: Any = ckpt.data.resumable(DataLoader(Samples(), batch_size=4, shuffle=True))
    going = iter(batches)
    next(going)
    with open_run(tmp_path) as checkpointer:
        checkpointer.save(model, optim, 1, loader=batches, shared={"note": "x"})
        checkpointer.save(model, optim, 2, loader=batches, shared={"note": "y"})
        expected = [batch.tolist() for batch in going] + [random.random(), float(torch.rand(()))]
    other, _ = trained(5)
    loader: Any = ckpt.data.resumable(DataLoader(Samples(), batch_size=4, shuffle=True))
    with open_run(tmp_path) as checkpointer:
        with checkpointer.restore_in_stages(checkpoint=1) as stages:
            stages.model(other)
            assert same_state(other.state_dict(), model.state_dict())
            with torch.no_grad():
                other.get_parameter("weight").zero_()
            late = torch.optim.AdamW(other.parameters(), lr=0.5)
            stages.optimizers(late)
            restored = present(stages.extras(loader=loader, shared={"note": None}))
            assert restored.values == {"note": "x"}
            assert stages.restored is restored
            wait_until(lambda: leases(tmp_path) == 1)  # of the extras; that of the model is released in a thread
            seed_all(9)
        assert torch.count_nonzero(other.get_parameter("weight")) == 0, "the model is not read again"
        assert same_state(late.state_dict(), optim.state_dict())
        seed_all(9)
        assert ([batch.tolist() for batch in loader] + [random.random(), float(torch.rand(()))]) == expected
        checkpointer.save(other, late, 2)  # after the restored step: the same lineage


def test_random_state_is_put_back_when_it_is_asked_for_or_at_the_end(tmp_path: Path) -> None:
    model, optim = trained(0)
    with open_run(tmp_path) as checkpointer:
        checkpointer.save(model, optim, 1)
        expected = random.random()
        with checkpointer.restore_in_stages() as stages:
            stages.model(model)
            assert random.random() != expected
        assert random.random() == expected
        with checkpointer.restore_in_stages() as stages:
            stages.model(model)
            stages.rng()
            assert random.random() == expected
        assert random.random() != expected
        with contextlib.suppress(ZeroDivisionError), checkpointer.restore_in_stages() as stages:
            stages.model(model)
            raise ZeroDivisionError
        assert random.random() != expected


def test_a_run_without_a_checkpoint_and_stages_in_a_wrong_order(tmp_path: Path) -> None:
    model, optim = trained(0)
    with open_run(tmp_path) as checkpointer:
        with checkpointer.restore_in_stages() as stages:
            assert stages.model(model) is None
            checkpointer.save(model, optim, 1)  # the first stage has decided
            assert stages.optimizers(optim) is None
            assert stages.restored is None
        with (
            checkpointer.restore_in_stages() as stages,
            pytest.raises(InvalidRequest, match="names of the model's parameters"),
        ):
            stages.optimizers(optim)


def test_a_shared_loader_also_puts_random_state_back_at_its_position(tmp_path: Path) -> None:
    batches: Any = ckpt.data.resumable(DataLoader(Samples(), batch_size=4, shuffle=True))
    going = iter(batches)
    next(going)
    with open_run(tmp_path) as checkpointer:
        checkpointer.save(None, None, 1, shared={"loader": batches})
        expected = [batch.tolist() for batch in going]
    loader: Any = ckpt.data.resumable(DataLoader(Samples(), batch_size=4, shuffle=True))
    with open_run(tmp_path) as checkpointer:
        with checkpointer.restore_in_stages() as stages:
            stages.extras(shared={"loader": loader})
        seed_all(9)
        assert [batch.tolist() for batch in loader] == expected


def save(store: str) -> None:
    with Checkpointer(store, run="r", writer="thread") as checkpointer:
        checkpointer.save(None, None, 1, own={"tensor": torch.full((3,), 7.0)})


def restore(store: str, replica_reads: Any) -> dict[str, Any]:
    live = {"tensor": torch.zeros(3)}
    checkpointer = Checkpointer(store, run="r", writer="thread", replica_reads=replica_reads)
    with checkpointer, patch.object(World, "decide", autospec=True, side_effect=World.decide) as decide:
        present(checkpointer.restore(own=live))
    return {"meetings": decide.call_count, "values": live["tensor"].tolist()}


def restore_deleted(store: str, replica_reads: Any) -> dict[str, str]:
    """What a restore raises if its checkpoint is deleted once rank 0 has chosen it."""
    save(store)
    method, run = World.decide, Run(open_store(store), "r")

    def decide(self: World, value: Any, choose: Callable[[list[Any]], Any]) -> Any:
        def choose_and_delete(values: list[Any]) -> Any:
            chosen = choose(values)
            for checkpoint in list_checkpoints(run):
                delete_checkpoint(run, checkpoint.attempt, "test", force=True)
            return chosen

        return method(self, value, choose_and_delete)

    checkpointer = Checkpointer(store, run="r", writer="thread", replica_reads=replica_reads)
    with checkpointer, patch.object(World, "decide", decide), pytest.raises(CkptError) as caught:
        checkpointer.restore(own={"tensor": torch.zeros(3)}, checkpoint=1)
    return {"code": caught.value.code, "message": caught.value.message}


def fail(failing: dict[str, list[Any]]) -> dict[str, Any]:
    """Each rank fails in the step of this number with this error; what it raises, and whether rank 0 has chosen."""
    kinds = {"damaged": CorruptObject, "deleted": NoCheckpoint, "unfit": StateMismatch, "bug": ValueError}
    at, kind = failing.get(str(dist.get_rank()), [-1, ""])
    found: dict[str, Any] = {"chosen": False}

    def step(number: int) -> None:
        if number == at:
            raise kinds[kind](f"{kind} on rank {dist.get_rank()}")

    def choose() -> str:
        found["chosen"] = True
        step(3)
        return "first"

    together = Together(World(30))
    try:
        answers, chosen = together.do_and_choose(
            (lambda: step(0), lambda: step(1), lambda: step(2)), lambda: [dist.get_rank()], choose
        )
        found |= {"answers": answers, "result": chosen}
    except CkptError as error:
        found |= {"code": error.code, "message": error.message}
    found["later"] = together.do(report=dist.get_rank), together.do_and_choose((), lambda: None, lambda: "again")[1]
    return found
