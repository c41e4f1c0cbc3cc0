"""Resolve: choose the checkpoint to restore, and protect it from deletion."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from functools import partial

from ckpt.config import Config
from ckpt.host.lock import LOCAL, note_checkpoint, noted_checkpoint, wait_for_orphans
from ckptapi.remote_create import with_remote_create
from ckptstore.commits import catalog
from ckptstore.commits.catalog import Checkpoint, State
from ckptstore.commits.hidden import hidden_attempts
from ckptstore.errors import (
    CkptError,
    Damaged,
    InvalidName,
    ObjectMissing,
    RunVanished,
    StoreReadOnly,
    Thinned,
    Unavailable,
)
from ckptstore.names import Attempt, Reference, RunKeys
from ckptstore.reading.fetch import Progress
from ckptstore.reading.source import Source, StoreSource
from ckptstore.retention.deletion import advance, undecided_and_decided
from ckptstore.run import Run, identity
from ckptstore.tiers.source import REMOTE, TieredSource

logger = logging.getLogger(__name__)

_SIMILAR = 0.85
"""The least ratio of difflib: one letter of seven differs."""
ORPHAN_TIMEOUT_S = 120.0
"""How long a restore waits for the saver of a killed predecessor on this host: as long as that repeats its requests."""
LEASE_S = 24 * 3600.0
"""Longest protection of the restored checkpoint; it ends earlier at the resumed run's first commit."""


def wait_for_orphan_saver(config: Config) -> None:
    """Wait until the saver of a killed predecessor on this host has finished its uploads."""
    if config.read_only:
        return
    if not wait_for_orphans(config.source, config.run_name, ORPHAN_TIMEOUT_S):
        logger.warning(
            "a saver of run %r is still running on this host after %.0f s, or other processes keep looking for one; "
            "its later commits are not restored",
            config.run_name,
            ORPHAN_TIMEOUT_S,
        )


def _advance(run: Run) -> Sequence[Attempt] | None:
    """Commit attempts that are complete except for their commit. Returns the decided ones, if none was left to
    decide; None: list them."""
    undecided, decided = undecided_and_decided(run)
    for attempt in undecided:
        try:
            if advance(run, attempt):
                logger.warning("committed %s, which was complete except for its commit", attempt)
        except StoreReadOnly as error:
            logger.warning("%s may be complete and is left uncommitted: %s", attempt, error)
    return None if undecided else decided


def candidates(source: Source, config: Config, reference: Reference) -> Iterator[Checkpoint]:
    """The checkpoints to try, best first: all of the run if none is named, otherwise the named one.

    Lazy: the store is not read before the first item is requested. If the roll-forward finds an attempt that is not
    decided, outcomes are listed after it, not before: a saver that commits meanwhile would be missed, and training
    would resume from an older step.
    """
    decided = None
    if isinstance(source, TieredSource):
        # An incomplete remote checkpoint is the copy of a local one: the next saver continues it.
        _advance(Run(source.local.store, config.run_name))
    elif isinstance(source, StoreSource):
        decided = _advance(Run(with_remote_create(source.store, config.daemon, config.token), config.run_name))
    if not reference.newest:
        yield source.find(reference)
        return
    own = reference.run == config.run_name
    if own:
        _check_local(source, config)
    if own and decided is not None and isinstance(source, StoreSource):
        found = catalog.candidates(source.run(reference.run), decided)
    else:
        found = source.candidates(reference.run)
    newest = next(found, None)
    if newest is None:
        check_present(source, config)
        if thinned := [c.id for c in source.checkpoints(reference.run) if c.thinned]:
            raise Thinned(
                f"all checkpoints of run {reference.run!r} in {source.url} are thinned, {thinned[0]} is the newest",
                "Name it to restore its weights, without an optimizer, or use another run",
            )
        _warn_of_similar(source, config)
        return
    yield newest
    yield from found


def nearest_full(source: Source, thinned: Checkpoint) -> str:
    """Which checkpoint of its run can be resumed in place of a thinned one, in words. Reads all outcomes."""
    full = [c for c in source.checkpoints(thinned.run) if c.state is State.COMMITTED]
    nearest = min(full, key=lambda c: abs(c.step - thinned.step), default=None)
    return f"{nearest.id} is the nearest full one" if nearest is not None else "No full one is left"


def check_present(source: Source, config: Config, noted: bool = False) -> None:
    """Return if the run may begin in this store. Reads only; a daemon is not asked.

    noted: read only what this host has a note about. Raises NoSuchBucket or Unavailable, and RunVanished if the stores
    lack checkpoints that the run had before: training from an earlier state would be silent, and so would its saves to
    the disk below an unmounted volume.
    """
    _check_local(source, config)
    if not isinstance(source, StoreSource):
        return
    note = noted_checkpoint(config.source, config.run_name)
    if (noted and note is None) or (isinstance(source, TieredSource) and source.is_local(config.run_name)):
        return
    present = any(True for _ in source.store.list_folders(f"{RunKeys(config.run_name).folder}/"))
    if note is not None and not present:
        raise RunVanished(
            f"{config.source} has nothing of run {config.run_name!r}, which had checkpoints on this host before",
            f"Mount the volume, or check the URL. If the run was deleted on purpose, remove {note}; "
            f"ckptctl rm {config.run_name} --all forgets it by itself",
        )


def _check_local(source: Source, config: Config) -> None:
    """Raises RunVanished if neither store has the newest checkpoint that this host has saved to a local tier, or a
    later one: a restore would go back without it, and the next save would abandon it."""
    note = noted_checkpoint(config.source, config.run_name, LOCAL)
    if note is None or not isinstance(source, StoreSource):
        return
    try:
        name, _, local = note.read_text().strip().partition(" ")
        attempt = Attempt.parse(name)
    except (InvalidName, OSError):
        return
    if isinstance(source, TieredSource):
        with suppress(Unavailable):
            if _reaches(source.local.run(config.run_name), attempt):
                return
    if not _reaches(source.run(config.run_name), attempt):
        raise RunVanished(
            f"step {attempt.step} of run {config.run_name!r} was saved on this host to {local}, and is neither there "
            f"nor in {config.source}",
            f"Mount that volume, and pass local={local!r}. If it is lost, restore(checkpoint=...) continues from a "
            f"checkpoint by name; if it was emptied on purpose, remove {note}",
        )


def _reaches(run: Run, attempt: Attempt) -> bool:
    """Whether this attempt or a later one was decided there, or it was deleted."""
    return any(one >= attempt for one in catalog.decided_attempts(run)) or attempt in hidden_attempts(run)


def _warn_of_similar(source: Source, config: Config) -> None:
    """A mistyped run starts from nothing. Runs that differ only in numbers are different on purpose."""
    words = partial(re.sub, r"[0-9]+", "")
    try:
        others = {name.casefold(): name for name in source.runs() if words(name) != words(config.run_name)}
    except CkptError as error:
        logger.info("cannot list the runs of %s: %s", config.source, error)
        return
    for similar in get_close_matches(config.run_name.casefold(), others, 1, _SIMILAR):
        logger.warning(
            "run %r has no checkpoint in %s, so training begins at its start. Did you mean run %r?",
            config.run_name,
            config.source,
            others[similar],
        )


def newest_remote_generation(source: Source, config: Config, checkpoint: Checkpoint | None) -> int:
    """The newest generation of the remote store, if there is a local one: what the next session of this run has seen.

    checkpoint: the one to restore. If it is remote its generation was seen, although the remote store may be away by
    now.
    """
    if not isinstance(source, TieredSource):
        return 0
    restored = checkpoint.attempt.generation if checkpoint is not None and REMOTE in checkpoint.tiers else 0
    return max(source.newest_generation(config.run_name), restored)


def note_restored(source: Source, config: Config, run: str) -> None:
    """Remember on this host that the run has a checkpoint (check_present); not if that of another run was restored."""
    if (
        run == config.run_name
        and isinstance(source, StoreSource)
        and not isinstance(source, TieredSource)
        and source.store.shared_between_processes
    ):
        note_checkpoint(config.source, config.run_name)


def take_lease(source: Source, checkpoint: Checkpoint) -> str | None:
    """Protect the checkpoint from deletion; returns None if the store is read-only. Raises NoCheckpoint."""
    try:
        return source.take_lease(checkpoint, f"restore:{identity()}", LEASE_S)
    except StoreReadOnly as error:
        logger.info("restoring %s without a lease: %s", checkpoint.id, error)
        return None


def note_damage(source: Source, checkpoint: Checkpoint, error: CkptError, progress: Progress = lambda _: None) -> None:
    """Record that a restore found a checkpoint damaged, if a second read from the store confirms it.

    A daemon confirms and records it in a job, later. From then on the checkpoint is listed as corrupt, and no save
    references its chunks. Never raises CkptError: what cannot be recorded is logged. progress: called while it reads.
    """
    if checkpoint.state is State.CORRUPT or not isinstance(error, (Damaged, ObjectMissing)):
        return
    try:
        if isinstance(source, StoreSource):
            from ckptstore.retention.scrubbing import confirm_damage  # only with damage

            store = source.remote_or_local(checkpoint).store if isinstance(source, TieredSource) else source.store
            found = confirm_damage(Run(store, checkpoint.run), checkpoint, error.chunks, progress)
            if found is not None and found.ok:
                logger.warning("%s is not listed as corrupt: a second read of the store found no damage", checkpoint.id)
        else:
            from ckptapi.bodies import ChunkBody, VerifyJob  # only with a daemon
            from ckptapi.client import DaemonClient

            if isinstance(source, DaemonClient):
                chunks = [ChunkBody(shard=shard, index=index) for shard, index in error.chunks]
                source.start_job(VerifyJob(checkpoint=checkpoint.id, chunks=chunks))
    except CkptError as failure:
        logger.warning("the damage of %s is not recorded: %s", checkpoint.id, failure)


@contextmanager
def noting_damage(source: Source, checkpoint: Checkpoint) -> Iterator[None]:
    """Record damage that an error of the block reports; see note_damage."""
    try:
        yield
    except (Damaged, ObjectMissing) as error:
        note_damage(source, checkpoint, error)
        raise


@contextmanager
def leased(source: Source, checkpoint: Checkpoint) -> Iterator[None]:
    """Protect the checkpoint from deletion during the block. Raises NoCheckpoint."""
    lease = take_lease(source, checkpoint)
    try:
        yield
    finally:
        if lease is not None:
            release_lease(source, checkpoint.run, lease)


def release_lease(source: Source, run: str, lease: str) -> None:
    """End the protection. A failure is only logged, because the lease expires anyway."""
    try:
        source.release_lease(run, lease)
    except CkptError as error:
        logger.warning("lease %s was not released and will expire: %s", lease, error)
