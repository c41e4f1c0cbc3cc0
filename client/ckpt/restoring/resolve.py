"""Resolve: which checkpoint to restore, and keep it from being deleted meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice

from ckpt.config import Config
from ckpt.saver.lock import wait_for_orphans
from ckptapi.remote_create import with_remote_create
from ckptstore.commits.catalog import Checkpoint
from ckptstore.errors import CkptError, StoreReadOnly
from ckptstore.names import Reference
from ckptstore.reading.source import Source, StoreSource
from ckptstore.retention.deletion import advance, undecided_attempts
from ckptstore.run import Run, identity

logger = logging.getLogger(__name__)

LEASE_S = 24 * 3600.0
"""A run that resumed keeps what it resumed from at most so long, or until its first commit."""


def wait_for_orphan_saver(config: Config) -> None:
    """Let a killed predecessor's saver on this host finish its uploads."""
    if config.read_only:
        return
    if not wait_for_orphans(config.source, config.run_name, config.orphan_saver_timeout_s):
        logger.warning(
            "a saver of run %r is still at work on this host after %.0f s; what it commits later is not restored",
            config.run_name,
            config.orphan_saver_timeout_s,
        )


def _roll_forward(source: Source, config: Config) -> bool:
    """Commit what lacks nothing but the commit; whether there was anything."""
    any_committed = False
    if isinstance(source, StoreSource):
        run = Run(with_remote_create(source.store, config.daemon, config.token), config.run_name)
        for attempt in undecided_attempts(run):
            try:
                if advance(run, attempt):
                    any_committed = True
                    logger.warning("committed %s, which was complete but for its commit", attempt)
            except StoreReadOnly as error:
                logger.warning("%s may be complete and is left uncommitted: %s", attempt, error)
    return any_committed


def candidates(source: Source, config: Config, reference: Reference) -> Iterator[Checkpoint]:
    """What to try, best first: all of the run's for its newest, else just the one that is named.

    The store is first touched when the first one is asked for.
    """
    if reference.step is not None:
        _roll_forward(source, config)
        yield source.find(reference)
        return
    # Each is some requests, one after the other, and there is rarely anything to commit.
    with ThreadPoolExecutor(1, thread_name_prefix="ckpt-roll-forward") as pool:
        rolled = pool.submit(_roll_forward, source, config)
        found = source.candidates(reference.run)
        first = list(islice(found, 1))
    yield from source.candidates(reference.run) if rolled.result() else chain(first, found)


def take_lease(source: Source, checkpoint: Checkpoint) -> str | None:
    """Protect the checkpoint from deletion; None where this process may not write. Raises NoCheckpoint."""
    try:
        return source.take_lease(checkpoint, f"restore:{identity()}", LEASE_S)
    except StoreReadOnly as error:
        logger.info("restoring %s without a lease: %s", checkpoint.id, error)
        return None


def release_lease(source: Source, run: str, lease: str) -> None:
    """End the protection; a failure is no worse than a lease that expires, and only logged."""
    try:
        source.release_lease(run, lease)
    except CkptError as error:
        logger.warning("lease %s was not released and will expire: %s", lease, error)
