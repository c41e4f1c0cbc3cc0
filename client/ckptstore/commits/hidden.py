"""Attempts that no reader may use: those with a tombstone, and deleted ones, whose tombstone or abort is forgotten.

Each generation has a list of its deleted attempts. A version of the list is created only if absent, and the highest one
counts. It is durable before a tombstone or an aborted outcome of the attempts on it is removed, so that a committer
that wakes up after weeks brings nothing back. docs/decisions/0025 and 0027 have the sequences.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby

from ckptstore import names
from ckptstore.errors import CorruptObject, ObjectMissing, StoreUnavailable, StoreUnsafe
from ckptstore.format.documents import FORMAT
from ckptstore.format.parsing import seal
from ckptstore.format.records import DeletedList
from ckptstore.names import Attempt
from ckptstore.run import Run
from ckptstore.stores import ObjectInfo
from ckptstore.threads import in_parallel

_LOG = logging.getLogger(__name__)
_TRIES = 20


class DeletedAttempts:
    """The deleted attempts of a run, by one listing. The list of a generation is read when it is first needed.

    Raises Unavailable, or UnsupportedFormat for a list of a newer format. A damaged list counts as empty, with a
    warning.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._versions = _versions(run)
        self._lists: dict[int, frozenset[str]] = {}

    def __contains__(self, attempt: object) -> bool:
        assert isinstance(attempt, Attempt)
        generation = attempt.generation
        if generation not in self._lists:
            self._lists[generation] = _newest(self._run, generation, self._versions) or frozenset()
        return str(attempt) in self._lists[generation]

    def read(self, generations: Iterable[int]) -> None:
        """Read the lists of these generations at once."""
        wanted = [number for number in dict.fromkeys(generations) if number in self._versions]
        if len(wanted) > 1:
            found = in_parallel(lambda number: _newest(self._run, number, self._versions), wanted)
            self._lists.update((number, known or frozenset()) for number, known in zip(wanted, found, strict=True))

    @property
    def listed(self) -> list[ObjectInfo]:
        """The newest version of each list, as it was listed: if these are equal, so are the attempts."""
        return [found[max(found)] for found in self._versions.values()]


class HiddenAttempts:
    """The attempts of a run that are being deleted, or are deleted for good."""

    def __init__(self, run: Run, at_once: bool = False) -> None:
        """at_once: list both at the same time. An attempt that is forgotten in that moment may be in neither: only for
        a reader that takes a lease, which looks once more.
        """
        with ThreadPoolExecutor(1) as background:
            deleted = background.submit(DeletedAttempts, run) if at_once else None
            listed = [(attempt, names.is_thinning(id)) for attempt, id, _ in run.listed(run.keys.tombstones)]
            self.tombstoned = frozenset(attempt for attempt, thins in listed if not thins)
            self.thinned = frozenset(attempt for attempt, thins in listed if thins)
            """Those whose optimizer state is being deleted, or is deleted. They are not hidden by that."""
        # The lists second: an attempt is on the list before its tombstone is removed.
        self.deleted = deleted.result() if deleted is not None else DeletedAttempts(run)

    def __contains__(self, attempt: object) -> bool:
        return attempt in self.tombstoned or attempt in self.deleted

    def lost(self, attempt: Attempt, thinned: bool) -> str:
        """`deleted` or `thinned` if it is of no use any more, else empty. thinned: optimizer state is not needed."""
        return "deleted" if attempt in self else "thinned" if attempt in self.thinned and not thinned else ""


def hidden_attempts(run: Run) -> HiddenAttempts:
    """The attempts that are hidden now: one listing of tombstones, then one of the lists of deleted attempts.

    A process that writes a lease, a pin or a mark looks here after the write; a reader, after it listed the outcomes.
    """
    return HiddenAttempts(run)


def without_hidden(attempts: Collection[Attempt], hidden: HiddenAttempts) -> list[Attempt]:
    """The attempts that are not hidden, in the same order."""
    left = [attempt for attempt in attempts if attempt not in hidden.tombstoned]
    hidden.deleted.read(attempt.generation for attempt in left)
    return [attempt for attempt in left if attempt not in hidden.deleted]


def record_deleted(run: Run, attempts: Collection[Attempt]) -> set[Attempt]:
    """Put attempts on the lists of deleted attempts; durable on return. Returns those of which nothing need be kept
    now.

    attempts: swept or aborted, without an outcome that is committed and without data. An attempt is missing in the
    result if the list of its generation is damaged, or if only a daemon may create a version (docs/decisions/0014).
    """
    recorded: set[Attempt] = set()
    for generation, group in groupby(sorted(attempts), key=lambda attempt: attempt.generation):
        recorded |= _add(run, generation, set(group))
    return recorded


def listed_attempts(run: Run, prefix: str) -> list[Attempt]:
    """The attempts that name the objects below a prefix, newest first."""
    return sorted((attempt for attempt, _, _ in run.listed(prefix)), reverse=True)


def _add(run: Run, generation: int, attempts: set[Attempt]) -> set[Attempt]:
    wanted = set(map(str, attempts))
    for _ in range(_TRIES):
        versions = _versions(run)
        known = _newest(run, generation, versions)
        if known is None:
            return set()
        number = max(versions.get(generation, {}), default=0)
        if wanted <= known:
            lower = [info.key for version, info in versions[generation].items() if version < number]
            run.store.delete_many(lower)
            return attempts
        proposal = DeletedList(
            format=FORMAT, kind="dead", generation=generation, version=number + 1,
            attempts=sorted(known | wanted), by=run.by, at=run.clock(),
        )  # fmt: skip
        try:
            # Created or not: the highest version in the next listing counts. A collector that slept may have created
            # a low one that was removed before.
            run.store.put_if_absent(run.keys.deleted_list(generation, number + 1), seal(proposal))
        except StoreUnsafe as error:
            _LOG.info("tombstones of run %r are kept until a daemon collects: %s", run.name, error)
            return set()
    raise _changed_too_often(run)


def _versions(run: Run) -> dict[int, dict[int, ObjectInfo]]:
    """The stored versions of the lists by generation, usually one each. One request."""
    found: dict[int, dict[int, ObjectInfo]] = {}
    for info in run.store.list(run.keys.deleted_lists):
        named = names.deleted_list_version(info.key)
        if named is not None:
            found.setdefault(named[0], {})[named[1]] = info
    return found


def _newest(run: Run, generation: int, versions: dict[int, dict[int, ObjectInfo]]) -> frozenset[str] | None:
    """The deleted attempts of a generation, by name; None if the list is damaged."""
    for _ in range(_TRIES):
        there = versions.get(generation)
        if not there:
            return frozenset()
        version = max(there)
        key = run.keys.deleted_list(generation, version)
        try:
            found = run.read(key, DeletedList)
            if (found.generation, found.version) == (generation, version):
                return frozenset(found.attempts)
            raise CorruptObject(f"{run.store.object_url(key)} is the list of another generation or version")
        except ObjectMissing:
            versions = _versions(run)  # removed since the listing, because a higher one exists
        except CorruptObject as error:
            _LOG.warning("a list of deleted attempts counts as empty: %s", error)
            return None
    raise _changed_too_often(run)


def _changed_too_often(run: Run) -> StoreUnavailable:
    text = f"the list of deleted attempts of run {run.name!r} is changed too often by others"
    return StoreUnavailable(text, "Try again")
