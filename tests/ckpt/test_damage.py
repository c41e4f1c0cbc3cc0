from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from ckpt import Checkpointer
from ckpt.dcp import StorageReader
from ckptapi.bodies import ChunkBody, VerifyJob
from ckptstore import names
from ckptstore.codecs.chunk_codecs import Buffer
from ckptstore.commits.catalog import Checkpoint, State, latest, list_checkpoints, quarantined_attempts
from ckptstore.commits.references import marks
from ckptstore.errors import Damaged, ObjectMissing, StoreReadOnly, StoreUnavailable
from ckptstore.format.parsing import parse_sealed
from ckptstore.format.records import Finding
from ckptstore.names import RunKeys, shard_name
from ckptstore.reading.source import StoreSource
from ckptstore.reading.verify import verify
from ckptstore.retention.deletion import delete_checkpoint
from ckptstore.retention.scrubbing import confirm_damage, scrub
from ckptstore.run import Run
from ckptstore.stores import open_store
from ckptstore.stores.base import WrappedStore
from tests.support.checkpoints import flip
from tests.support.daemons import running_daemon
from tests.support.parallel.runner import Scenario, run_scenario
from tests.support.waiting import present, wait_until

RUN = "r"
SHARD = names.shard_name(0)


def state_at(step: int) -> nn.Module:
    """The state after a step; a replay of the step gives the same bits."""
    torch.manual_seed(step)
    return nn.Linear(512, 256)


def save_two(checkpointer: Checkpointer) -> list[Checkpoint]:
    """Steps 1 and 2, which have no bytes in common."""
    return [checkpointer.save(state_at(step), None, step) for step in (1, 2)]


def saved_two(folder: Path) -> list[Checkpoint]:
    with Checkpointer(str(folder), run=RUN, writer="thread") as checkpointer:
        return save_two(checkpointer)


def run_of(folder: Path) -> Run:
    return Run(open_store(str(folder)), RUN)


def quarantine(folder: Path) -> list[int]:
    return [attempt.step for attempt in quarantined_attempts(run_of(folder))]


def flip_shard(folder: Path, checkpoint: Checkpoint) -> None:
    path = folder / RunKeys(RUN).shard(checkpoint.attempt, SHARD)
    flip(path, 1000)


@pytest.mark.parametrize("restart", [True, False])
def test_a_replay_after_damage_is_not_born_damaged(restart: bool, tmp_path: Path) -> None:
    """A bit-exact replay of the lost step has the bytes of the damaged checkpoint, and must not reference them."""
    checkpointer = Checkpointer(str(tmp_path), run=RUN, writer="thread")
    first, second = save_two(checkpointer)
    flip_shard(tmp_path, second)
    if restart:
        checkpointer.close()
        checkpointer = Checkpointer(str(tmp_path), run=RUN, writer="thread")
    with checkpointer:
        restored = present(checkpointer.restore(state_at(0)))
        assert (restored.checkpoint.id, latest(run_of(tmp_path)).attempt) == (first.id, first.attempt)
        replayed = checkpointer.save(state_at(2), None, 3)
    source = StoreSource(open_store(str(tmp_path)))
    assert verify(source, replayed).ok
    assert [c.state for c in source.checkpoints(RUN)] == [State.COMMITTED, State.CORRUPT, State.COMMITTED]


def _load(folder: Path) -> None:
    with Checkpointer(str(folder), run=RUN, writer="thread") as checkpointer:
        checkpointer.load(2)


def _load_through_dcp(folder: Path) -> None:
    load({"model": dict(state_at(0).state_dict())}, storage_reader=StorageReader(str(folder), run=RUN), no_dist=True)


def _restore_by_name(folder: Path) -> None:
    with Checkpointer(str(folder), run=RUN, writer="thread") as checkpointer:
        checkpointer.restore(state_at(0), checkpoint=2)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("read", [_load, _load_through_dcp, _restore_by_name])
@pytest.mark.parametrize("victim", ["shard", "missing shard", "receipt", "manifest"])
def test_every_reader_records_what_it_finds(read: Callable[[Path], None], victim: str, tmp_path: Path) -> None:
    if victim == "receipt" and read is not _restore_by_name:
        return  # the others need no receipt
    _, second = saved_two(tmp_path)
    keys = RunKeys(RUN)
    if victim == "missing shard":
        (tmp_path / keys.shard(second.attempt, SHARD)).unlink()
    elif victim == "shard":
        flip_shard(tmp_path, second)
    else:
        document = keys.receipt(second.attempt, 0) if victim == "receipt" else keys.manifest(second.attempt)
        path = tmp_path / document
        path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises((Damaged, ObjectMissing, CheckpointException)):
        read(tmp_path)
    run = run_of(tmp_path)
    assert [attempt.step for attempt in quarantined_attempts(run)] == [2]
    key = run.keys.quarantine_record(second.attempt)
    assert parse_sealed(run.store.get(key), Finding, key).problems
    assert latest(run).step == 1


def test_damage_that_only_one_rank_reads_is_recorded(tmp_path: Path) -> None:
    scenario = Scenario(f"{__name__}:restore_after_damage", 2, {"store": str(tmp_path / "store")})
    assert run_scenario(scenario, tmp_path) == [[1, 1], [1, 1]]
    run = Run(open_store(str(tmp_path / "store")), STAGES)
    (damaged,) = quarantined_attempts(run)
    key = run.keys.quarantine_record(damaged)
    (problem,) = parse_sealed(run.store.get(key), Finding, key).problems
    assert "shard-00001" in problem


class ReadsOnce(WrappedStore):
    """The first read of a shard fails, or has a wrong bit; the bytes at rest are intact."""

    def __init__(self, folder: Path, failure: Exception | None) -> None:
        super().__init__(open_store(str(folder)))
        self._failure = failure
        self._lies = iter([True])

    def open_reader(self, key: str) -> Any:
        return super(WrappedStore, self).open_reader(key)  # by read_into

    def read_into(self, key: str, offset: int, buffer: memoryview) -> int:
        count = super().read_into(key, offset, buffer)
        if key.endswith(".ckpt") and next(self._lies, False):
            if self._failure is not None:
                raise self._failure
            buffer[0] ^= 1
        return count


@pytest.mark.parametrize("failure", [None, StoreUnavailable("no answer")])
def test_an_intact_one_is_spared(failure: Exception | None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved_two(tmp_path)
    with Checkpointer(str(tmp_path), run=RUN, writer="thread") as checkpointer:
        assert isinstance(checkpointer._source, StoreSource)
        checkpointer._source.store = ReadsOnce(tmp_path, failure)
        if failure is not None:
            with pytest.raises(StoreUnavailable):
                checkpointer.restore(state_at(0))
        else:
            assert present(checkpointer.restore(state_at(0))).step == 1
            assert "a second read of the store found no damage" in caplog.text
    assert (quarantine(tmp_path), latest(run_of(tmp_path)).step) == ([], 2)


def test_a_deleted_checkpoint_is_not_damaged(tmp_path: Path) -> None:
    first, _ = saved_two(tmp_path)
    run = run_of(tmp_path)
    delete_checkpoint(run, first.attempt, "test")
    assert confirm_damage(run, first, (), lambda _: None) is None
    assert quarantine(tmp_path) == []


class NoFindings(WrappedStore):
    """Refuses findings, as a store does that others may only read."""

    def put(self, key: str, data: Buffer) -> None:
        if "/quarantine/" in key:
            raise StoreReadOnly(f"{key} cannot be written")
        super().put(key, data)


def test_a_finding_that_cannot_be_written_fails_no_restore(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, second = saved_two(tmp_path)
    flip_shard(tmp_path, second)
    with Checkpointer(str(tmp_path), run=RUN, writer="thread") as checkpointer:
        assert isinstance(checkpointer._source, StoreSource)
        checkpointer._source.store = NoFindings(checkpointer._source.store)
        restored = present(checkpointer.restore(state_at(0)))
    assert restored.step == 1
    assert f"the damage of {second.id} is not recorded" in caplog.text
    assert quarantine(tmp_path) == []


def test_a_daemon_records_damage_that_it_finds_itself(tmp_path: Path) -> None:
    first, second = saved_two(tmp_path)
    flip_shard(tmp_path, second)
    with (
        running_daemon(f"file://{tmp_path}") as daemon,
        daemon.client() as client,
        Checkpointer(daemon.url, run=RUN) as checkpointer,
    ):
        assert present(checkpointer.restore(state_at(0))).checkpoint.id == first.id
        wait_until(lambda: client.latest(RUN).id == first.id, "the end of the job")
        assert quarantine(tmp_path) == [2]
        wait_until(lambda: not client.jobs()[0].state.live, "the end of the job")
        (job,) = client.jobs()
        assert job.result == {"checked": 1, "corrupt": [second.id], "num_corrupt": 1}
        # A reader's word alone is not enough.
        claimed = client.run_job(VerifyJob(checkpoint=first.id, chunks=[ChunkBody(shard=SHARD, index=0)]))
        assert claimed.result == {"checked": 1, "corrupt": [], "num_corrupt": 0}
        assert quarantine(tmp_path) == [2]
        assert [c.state for c in client.checkpoints(RUN)] == [State.CORRUPT, State.COMMITTED]


@pytest.mark.parametrize("compress", ["fast", "off"])
def test_the_next_save_of_a_live_trainer_heals_what_it_still_has(compress: Any, tmp_path: Path) -> None:
    """It stores its state once more, because nothing references a damaged checkpoint; under another codec as well."""
    model, run = state_at(1), run_of(tmp_path)
    with Checkpointer(str(tmp_path), run=RUN, writer="thread", compress="fast") as checkpointer:
        saved = [checkpointer.save(model, None, step) for step in (1, 2)]
    key = run.keys.shard(saved[0].attempt, SHARD)
    intact = run.store.get(key)
    flip_shard(tmp_path, saved[0])
    assert [found.ok for found in scrub(run.store, saved, "me", run.clock)] == [False, False]
    with Checkpointer(str(tmp_path), run=RUN, writer="thread", compress=compress) as checkpointer:
        assert checkpointer.save(model, None, 3).referenced_bytes == 0
    healed = scrub(run.store, saved, "me", run.clock, heal_from=())
    assert ([found.ok for found in healed], run.store.get(key)) == ([True, True], intact)
    assert quarantine(tmp_path) == []


def damaged_by_each_shard(folder: Path) -> list[int]:
    """For each shard, the number of checkpoints that need something of it."""
    run = run_of(folder)
    counts = Counter(mark.attempt for mark in marks(run))
    return [1 + counts[checkpoint.attempt] for checkpoint in list_checkpoints(run)]


@pytest.mark.parametrize("restart", [False, True])
def test_a_damaged_byte_costs_a_part_of_the_run(restart: bool, tmp_path: Path) -> None:
    """What many checkpoints reference is stored again, a part at a time."""
    frozen = {f"frozen{number}": torch.randn(16 * 1024 * 1024 // 48) for number in range(8)}
    model = nn.ParameterDict({**frozen, "trained": torch.zeros(1000)})
    knobs: dict[str, Any] = {"writer": "thread", "compress": "off"}
    saved: list[Checkpoint] = []
    while len(saved) < 20:
        with Checkpointer(str(tmp_path), run=RUN, max_references=6, **knobs) as checkpointer:
            for _ in range(2 if restart else 20):
                model["trained"].data.add_(1)
                saved.append(checkpointer.save(model, None, len(saved)))
    assert max(damaged_by_each_shard(tmp_path)) <= 1 + 6
    whole, later = saved[0].stored_bytes, [c.stored_bytes for c in saved[1:]]
    assert max(later) < 0.6 * whole, "not all of it in one save"
    assert sum(later) < 5 * whole, "nor in every save"
    store = StoreSource(run_of(tmp_path).store)
    assert all(verify(store, checkpoint).ok for checkpoint in list_checkpoints(run_of(tmp_path)))


def test_what_an_old_process_stored_is_stored_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its age counts, because the marks of deleted checkpoints do not."""
    model = state_at(0)
    saved: list[list[Checkpoint]] = []
    for age_s in (3600.0, 0.0):
        monkeypatch.setattr("ckpt.saver.incremental._MOST_AGE_S", age_s)
        with Checkpointer(str(tmp_path), run=RUN, writer="thread") as checkpointer:
            saved.append([checkpointer.save(model, None, len(saved) * 2 + step) for step in range(2)])
    assert [[bool(c.referenced_bytes) for c in of] for of in saved] == [[False, True]] * 2


STAGES = "stages"


def restore_after_damage(store: str) -> list[int]:
    """Every rank has a stage of its own; that of rank 1 is damaged in the newer of two checkpoints.

    Returns the restored step, and the latest one after that.
    """
    rank = dist.get_rank()
    model = nn.ModuleDict({f"stage{rank}": nn.Linear(64, 64)})
    with Checkpointer(store, run=STAGES, writer="thread", max_references=0) as checkpointer:
        newest = [checkpointer.save(model, None, step) for step in (1, 2)][-1]
        if rank == 1:
            path = Path(store) / RunKeys(STAGES).shard(newest.attempt, shard_name(rank))
            path.write_bytes(bytes(8) + path.read_bytes()[8:])
        dist.barrier()
        return [present(checkpointer.restore(model)).step, present(checkpointer.latest()).step]
