"""Chunks of earlier checkpoints: read and checked like one's own, never deleted while a checkpoint may need them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from ckptstore import names
from ckptstore.clock import system_clock
from ckptstore.commits.catalog import Checkpoint, list_checkpoints
from ckptstore.commits.commit import commit_attempt, read_outcome, read_receipt
from ckptstore.commits.references import Mark, marks, referenced_attempts
from ckptstore.errors import CheckpointHeld, CkptError, CorruptObject, ObjectMissing, ReferenceLost, UnsupportedFormat
from ckptstore.format import parsing
from ckptstore.format.columns import column
from ckptstore.format.documents import Bases, References
from ckptstore.format.merging import StoredReceipt
from ckptstore.format.parsing import parse_sealed, seal
from ckptstore.format.planning import plan_all, plan_reads
from ckptstore.format.records import Policy
from ckptstore.format.shards import Places
from ckptstore.names import Attempt, RunKeys, new_ulid
from ckptstore.reading.source import StoreSource, read_manifest
from ckptstore.reading.verify import verify
from ckptstore.retention.deletion import ORPHAN_GRACE_S, advance, collect, delete_checkpoint, hide, undelete
from ckptstore.retention.healing import Healed, heal
from ckptstore.retention.pins import active_holds
from ckptstore.retention.pruning import apply_prune, plan_prune
from ckptstore.run import Run
from ckptstore.stores import Store, open_store
from ckptstore.tiers.copying import copy_checkpoint
from tests.ckptstore.format import independent_reader
from tests.conftest import in_memory
from tests.support.checkpoints import RUN, at_every_call, flipped, read_all, whole_entries, write_checkpoint, write_rank
from tests.support.stores import MovableClock

_F = TypeVar("_F", References, Bases)
Arrays = dict[str, npt.NDArray[Any]]


def state(step: int) -> Arrays:
    """Two frozen chunks with one that changes between them, and one that changes at the end."""
    rng = np.random.default_rng(7)
    return {
        "model/frozen": rng.standard_normal((200, 128)).astype(np.float64),
        "model/trained": np.full((200, 128), step + 0.5, np.float32),
        "model/table": rng.integers(0, 100, (200, 128), dtype=np.int32),
        "model/step": np.array(step, np.int16),
    }


def chain(store: Store, *steps: int) -> list[Checkpoint]:
    """Checkpoints of which each was written on the one before."""
    found: list[Checkpoint] = []
    for step in steps:
        base = found[-1].attempt if found else None
        found.append(write_checkpoint(store, RUN, step, state(step), base=base))
    return found


def test_what_is_referenced_is_read_where_it_lies(store: Store) -> None:
    first, second, third = chain(store, 1, 2, 3)
    for checkpoint in (first, second, third):
        arrays = {name: a.tobytes() for name, a in state(checkpoint.step).items()}
        assert read_all(StoreSource(store), checkpoint) == arrays
        assert verify(StoreSource(store), checkpoint).ok
    assert first.referenced_bytes == 0
    assert third.referenced_bytes == second.referenced_bytes > 20 * second.stored_bytes
    assert third.needed_bytes == pytest.approx(first.stored_bytes, rel=0.01)
    manifest = read_manifest(StoreSource(store), third)
    assert referenced_attempts(manifest.content) == [first.attempt], "never a reference to a reference"
    assert {chunk.attempt for chunk in plan_all(manifest.content)} == {None, str(first.attempt)}


def test_an_independent_reader_follows_references(tmp_path: Any) -> None:
    from ckptstore.stores import open_store

    chain(open_store(str(tmp_path)), 1, 2, 3)
    _, entries = independent_reader.read(str(tmp_path), RUN)
    assert {name: data for name, (_, _, data) in entries.items()} == {n: a.tobytes() for n, a in state(3).items()}


def test_a_checkpoint_of_references_alone_has_no_shard_file(store: Store) -> None:
    (first,) = chain(store, 1)
    again = write_checkpoint(store, RUN, 2, state(1), base=first.attempt)
    assert (again.stored_bytes, again.referenced_bytes) == (0, first.stored_bytes)
    assert [info.key for info in store.list(RunKeys(RUN).attempt(again.attempt)) if info.key.endswith("ckpt")] == []
    assert verify(StoreSource(store), again).ok
    assert read_all(StoreSource(store), again) == read_all(StoreSource(store), first)


@in_memory
def test_neighbours_in_one_file_are_read_at_once(store: Store) -> None:
    first, second = chain(store, 1, 2)
    content = read_manifest(StoreSource(store), second).content
    reads = plan_reads(content, whole_entries(content.entries.name))
    assert {(read.attempt, len(read.chunks)) for read in reads} == {(None, 2), (str(first.attempt), 3)}
    (shard,) = content.shards
    places = Places.of(shard)
    assert [places.adjoins(chunk) for chunk in range(1, 5)] == [True, False, False, False]


# Keeping what is needed.


def test_what_is_referenced_is_kept_until_the_last_that_needs_it_is_gone(store: Store) -> None:
    run = Run(store, RUN)
    first, second, third = chain(store, 1, 2, 3)
    with pytest.raises(CheckpointHeld, match=f"{first.id} is held by referenced:{third.id}, referenced:{second.id}"):
        delete_checkpoint(run, first.attempt, "test", force=True)
    assert len(list_checkpoints(run)) == 3
    plan = plan_prune(run, Policy(1))
    assert [c.step for c in plan.remove] == [2]
    reasons = {v.checkpoint.step: v.reasons for v in plan.decisions}
    assert reasons[1] == (f"referenced:{third.id}", f"referenced:{second.id}")
    apply_prune(run, plan)
    assert verify(StoreSource(store), third).ok
    delete_checkpoint(run, third.attempt, "test", force=True)
    assert ([c.step for c in list_checkpoints(run)], active_holds(run)) == ([1], {})
    delete_checkpoint(run, first.attempt, "test", force=True)
    assert list(store.list(run.keys.attempts)) == list(store.list(run.keys.references)) == []


def test_many_that_reference_are_counted_not_listed(store: Store) -> None:
    first, *others = chain(store, *range(1, 7))
    (reasons,) = active_holds(Run(store, RUN)).values()
    assert reasons == [f"referenced:{c.id}" for c in others[:-4:-1]] + ["referenced:2 more"]
    assert first not in others


def test_what_is_deleted_and_can_be_taken_back_keeps_the_data_that_it_references(store: Store) -> None:
    run = Run(store, RUN, by="me")
    first, second = chain(store, 1, 2)
    delete_checkpoint(run, second.attempt, "test", grace_s=3600, force=True)
    delete_checkpoint(run, first.attempt, "test", force=True)
    assert list_checkpoints(run) == []
    collect(run)
    undelete(run, second.attempt)
    assert [c.step for c in list_checkpoints(run)] == [2]
    assert verify(StoreSource(store), second).ok
    delete_checkpoint(run, second.attempt, "test", force=True)
    collect(run)
    assert list(store.list(run.keys.attempts)) == []


@in_memory
@pytest.mark.parametrize("gone", ["hidden", "swept", "never committed"])
def test_nothing_is_committed_on_what_is_gone(store: Store, gone: str) -> None:
    clock = MovableClock()
    run = Run(store, RUN, clock)
    (first,) = chain(store, 1)
    attempt = Attempt(2, new_ulid(clock()))
    base = Attempt(0, new_ulid(clock())) if gone == "never committed" else first.attempt
    if gone == "never committed":
        write_rank(store, RUN, base, state(1), world_size=2)
    receipt = write_rank(store, RUN, attempt, state(2), base=base)
    if gone != "never committed":
        delete_checkpoint(run, first.attempt, "test", grace_s=3600 if gone == "hidden" else 0, force=True)
    with pytest.raises(ReferenceLost, match=f"{names.checkpoint_id(RUN, attempt)} references chunks of"):
        commit_attempt(run, [receipt])
    assert read_outcome(run, attempt) is None
    assert not advance(run, attempt)
    clock.advance(ORPHAN_GRACE_S + 3600)
    collect(run)
    collect(run)
    assert marks(run) == []
    assert run.keys.attempts not in {info.key for info in store.list(run.keys.attempt(attempt))}


@in_memory
def test_an_undecided_attempt_holds_what_it_may_come_to_need(store: Store) -> None:
    """Its committer died after the marks; another process commits it later."""
    run = Run(store, RUN)
    (first,) = chain(store, 1)
    attempt = Attempt(2, new_ulid(system_clock()))
    receipt = write_rank(store, RUN, attempt, state(2), base=first.attempt)

    commit_attempt(run, [receipt])
    store.delete_many([run.keys.outcome(attempt)])
    with pytest.raises(CheckpointHeld):
        delete_checkpoint(run, first.attempt, "test", force=True)
    assert advance(run, attempt)
    assert all(verify(StoreSource(store), c).ok for c in list_checkpoints(run))


@in_memory
@pytest.mark.parametrize("grace_s", [0.0, 3600.0])
@pytest.mark.parametrize("committing", [True, False])
def test_a_commit_and_a_deletion_of_its_base_never_both_win(store: Store, grace_s: float, committing: bool) -> None:
    """At every call of one of them, the other one does all of its work."""
    clock = MovableClock()
    run = Run(store, RUN, clock)

    def set_up(store: Store) -> tuple[Checkpoint, StoredReceipt]:
        clock.advance(1)
        first = write_checkpoint(store, RUN, 1, state(1))
        return first, write_rank(store, RUN, Attempt(2, new_ulid(clock())), state(2), base=first.attempt)

    def commit(on: Store, scene: tuple[Checkpoint, StoredReceipt]) -> None:
        with contextlib.suppress(CkptError):
            commit_attempt(Run(on, RUN, clock), [scene[1]])

    def delete(on: Store, scene: tuple[Checkpoint, StoredReceipt]) -> None:
        with contextlib.suppress(CkptError):
            delete_checkpoint(Run(on, RUN, clock), scene[0].attempt, "test", grace_s, force=True)

    ours, theirs = (commit, delete) if committing else (delete, commit)
    for (first, receipt), _, _ in at_every_call(store, set_up, ours, partial(theirs, store), more_than=5):
        attempt = Attempt.parse(receipt.receipt.attempt)
        listed = {c.attempt: c for c in list_checkpoints(run)}
        assert attempt not in listed or first.attempt in listed
        clock.advance(7200)
        collect(run)
        if attempt in listed:
            assert verify(StoreSource(store), listed[attempt]).ok


# Damage.


def test_damage_shows_in_all_that_need_the_chunk(store: Store) -> None:
    first, second = chain(store, 1, 2)
    key = RunKeys(RUN).shard(first.attempt, names.shard_name(0))
    store.put(key, flipped(store.get(key), 0))
    assert [verify(StoreSource(store), c).ok for c in (first, second)] == [False, False]
    with pytest.raises(CorruptObject):
        read_all(StoreSource(store), second)


@in_memory
def test_an_unreferenced_checkpoint_is_not_needed(store: Store) -> None:
    first, second = chain(store, 1, 2)
    key = RunKeys(RUN).shard(first.attempt, names.shard_name(0))
    store.put(key, flipped(store.get(key), -1))  # of the step
    assert [verify(StoreSource(store), c).ok for c in (first, second)] == [False, True]


_ULID = "01HF0000000000000000000000"
_OTHER = f"{1:012d}-{_ULID}"
_BAD: dict[str, Callable[[References, str], References]] = {
    "itself": lambda r, own: replace_fields(r, attempts=[own]),
    "another run's": lambda r, own: replace_fields(r, attempts=["../other/" + _OTHER]),
    "twice": lambda r, own: replace_fields(r, attempts=r.attempts * 2),
    "unused": lambda r, own: replace_fields(r, attempts=[*r.attempts, _OTHER]),
    "out of order": lambda r, own: replace_fields(r, chunk=r.chunk[::-1].copy()),
    "repeated": lambda r, own: replace_fields(r, chunk=column([0, 0, 1])),
    "no chunk": lambda r, own: replace_fields(r, chunk=column([0, 1, 10**6])),
    "no attempt": lambda r, own: replace_fields(r, attempt=column([0, 0, 2**62])),
    "too far": lambda r, own: replace_fields(r, offset=column([0, 0, 2**63 - 1])),
    "too short": lambda r, own: replace_fields(r, offset=column([0])),
    "none": lambda r, own: replace_fields(r, attempts=[], chunk=column(), attempt=column(), offset=column()),
}


def replace_fields(references: _F, **fields: Any) -> _F:
    return msgspec.structs.replace(references, **fields)


@in_memory
@pytest.mark.parametrize("how", _BAD)
def test_references_that_make_no_sense_are_refused(store: Store, how: str) -> None:
    (first,) = chain(store, 1)
    attempt = Attempt(2, new_ulid(system_clock()))
    stored = write_rank(store, RUN, attempt, state(2), base=first.attempt)
    receipt, (shard,) = stored.receipt, stored.receipt.content.shards
    assert shard.references is not None
    assert len(shard.references.chunk) == 3
    bad = msgspec.structs.replace(shard, references=_BAD[how](shard.references, str(attempt)))
    content = msgspec.structs.replace(receipt.content, shards=[bad])
    data = seal(msgspec.structs.replace(receipt, content=content))
    with pytest.raises(CorruptObject):
        parse_sealed(data, type(receipt), "receipt")
    with pytest.raises(CorruptObject):
        StoredReceipt.of(msgspec.structs.replace(receipt, content=content), data)


def test_marks_that_are_not_ours_are_left_alone(store: Store) -> None:
    run = Run(store, RUN, by="me")
    first, second = chain(store, 1, 2)
    store.put(run.keys.references + "notes.txt", b"")
    store.put(run.keys.references + f"{first.attempt}.paper.json", b"")
    assert marks(run) == [Mark(first.attempt, second.attempt)]
    hide(run, [second.attempt], "test")
    assert marks(run) == [Mark(first.attempt, second.attempt)]


def updates(store: Store, *steps: int) -> list[Checkpoint]:
    """As `chain`, of states that change a little, stored as deltas."""
    rng = np.random.default_rng(3)
    arrays = state(0) | {"model/half": rng.standard_normal(70_000).astype(np.float16)}
    found: list[Checkpoint] = []
    for step in steps:
        small = rng.standard_normal(70_000) * (rng.random(70_000) < 0.01)
        changed = arrays["model/half"] + (small * 1e-3).astype(np.float16)
        arrays = arrays | {"model/half": changed, "model/table": arrays["model/table"] + (step == 4)}
        base = found[-1].attempt if found else None
        found.append(write_checkpoint(store, RUN, step, arrays, base=base, deltas=True))
        _updated[str(found[-1].attempt)] = {name: array.tobytes() for name, array in arrays.items()}
    return found


_updated: dict[str, dict[str, bytes]] = {}
"""What each checkpoint of `updates` must contain, by its attempt."""


def shard_key(checkpoint: Checkpoint) -> str:
    return RunKeys(RUN).shard(checkpoint.attempt, names.shard_name(0))


def test_deltas_are_decoded_on_what_earlier_checkpoints_store(store: Store) -> None:
    source, found = StoreSource(store), updates(store, 1, 2, 3, 4, 5)
    for number, checkpoint in enumerate(found):
        assert read_all(source, checkpoint) == _updated[str(checkpoint.attempt)]
        assert verify(source, checkpoint, ranks=[2]).ok
        needed = referenced_attempts(read_manifest(source, checkpoint).content)
        assert needed == [other.attempt for other in found[:number]]
        assert {mark.attempt for mark in marks(Run(store, RUN)) if mark.by == checkpoint.attempt} == {*needed}
    assert found[-1].stored_bytes < found[0].stored_bytes / 50
    assert found[-1].referenced_bytes > found[0].stored_bytes


def test_an_independent_reader_decodes_deltas(tmp_path: Any) -> None:
    for step in range(1, 5):
        root = str(tmp_path / str(step))
        newest = updates(open_store(root), *range(1, step + 1))[-1]
        _, entries = independent_reader.read(root, RUN)
        assert {name: data for name, (_, _, data) in entries.items()} == _updated[str(newest.attempt)]


@in_memory
def test_readers_that_do_not_know_deltas_call_them_newer(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = updates(store, 1, 2)
    monkeypatch.setattr(parsing, "_KNOWN", frozenset())
    assert verify(StoreSource(store), first).ok
    with pytest.raises(UnsupportedFormat, match=r"critical\.bases"):
        read_manifest(StoreSource(store), second)


@pytest.fixture
def copy() -> Store:
    """Another store."""
    return open_store(f"memory://{new_ulid(system_clock())}")


@pytest.mark.parametrize("number", range(3))
def test_a_damaged_base_is_named_and_healed(store: Store, copy: Store, number: int) -> None:
    found = updates(store, 1, 2, 3)
    for info in store.list(""):
        copy.put(info.key, store.get(info.key))
    store.put(shard_key(found[number]), flipped(store.get(shard_key(found[number])), 30))
    source, run = StoreSource(store), Run(store, RUN)
    assert [verify(source, c).ok for c in found] == [c.step <= number for c in found]
    for checkpoint in found[number:]:
        with pytest.raises(CorruptObject, match="does not match its checksum"):
            read_all(source, checkpoint)
        damaged = verify(source, checkpoint, ranks=[1])
        assert {read.attempt or str(checkpoint.attempt) for read in damaged.damaged} >= {str(found[number].attempt)}
        assert len({*damaged.problems}) == 1
        assert checkpoint is found[number] or str(found[number].attempt) in damaged.problems[0]
    healed = heal(run, verify(source, found[-1]), [copy], lambda _: None)
    assert healed == Healed((shard_key(found[number]),), ())
    assert store.get(shard_key(found[number])) == copy.get(shard_key(found[number]))
    assert all(verify(source, c).ok for c in found)


@pytest.mark.parametrize("number", range(2))
def test_a_missing_base_is_an_error(store: Store, number: int) -> None:
    found = updates(store, 1, 2, 3)
    store.delete_many([shard_key(found[number])])
    with pytest.raises(ObjectMissing):
        read_all(StoreSource(store), found[2])


def test_a_copy_has_whole_chunks(store: Store, copy: Store) -> None:
    original = updates(store, 1, 2, 3)[-1]
    copied = copy_checkpoint(StoreSource(store), original, Run(copy, "other"), lambda _: None).checkpoint
    assert (copied.referenced_bytes, referenced_attempts(read_manifest(StoreSource(copy), copied).content)) == (0, [])
    assert read_all(StoreSource(copy), copied) == _updated[str(original.attempt)]
    assert verify(StoreSource(copy), copied, ranks=[1]).ok
    again = copy_checkpoint(StoreSource(store), original, Run(copy, "other"), lambda _: None)
    assert again.existed


_BAD_BASES: dict[str, Callable[[Bases], Any]] = {
    "none": lambda b: None,
    "out of order": lambda b: replace_fields(b, of=b.of[::-1].copy()),
    "of another chunk": lambda b: replace_fields(b, of=b.of + 1),
    "too short": lambda b: replace_fields(b, of=b.of[1:]),
    "first a delta": lambda b: with_chunks(b, codec=b.chunks.codec[::-1].copy()),
    "no codec": lambda b: with_chunks(b, codec=b.chunks.codec + 100),
    "empty": lambda b: with_chunks(b, stored=b.chunks.stored * 0),
    "of another size": lambda b: with_chunks(b, raw=b.chunks.raw + 1),
    "half a digest": lambda b: with_chunks(b, digest=b.chunks.digest[:-8]),
    "in its own file": lambda b: msgspec.structs.replace(b, references=fewer(b.references)),
}


def fewer(found: References) -> References:
    return replace_fields(found, chunk=found.chunk[1:], attempt=found.attempt[1:], offset=found.offset[1:])


def with_chunks(bases: Bases, **fields: Any) -> Bases:
    return replace_fields(bases, chunks=msgspec.structs.replace(bases.chunks, **fields))


@in_memory
@pytest.mark.parametrize("how", [*_BAD_BASES, "no raw digest", "not announced"])
def test_bases_that_make_no_sense_are_refused(store: Store, how: str) -> None:
    newest = updates(store, 1, 2, 3)[-1]
    receipt = read_receipt(Run(store, RUN), newest.attempt, 0)
    (shard,) = receipt.content.shards
    assert shard.bases is not None
    if how in _BAD_BASES:
        shard = msgspec.structs.replace(shard, bases=_BAD_BASES[how](shard.bases))
    elif how == "no raw digest":
        shard = msgspec.structs.replace(shard, chunks=msgspec.structs.replace(shard.chunks, raw_digest=None))
    content = msgspec.structs.replace(receipt.content, shards=[shard])
    extensions = {} if how == "not announced" else receipt.extensions
    data = seal(msgspec.structs.replace(receipt, content=content, extensions=extensions))
    with pytest.raises(CorruptObject):
        parse_sealed(data, type(receipt), "receipt")
