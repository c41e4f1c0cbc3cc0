"""Decides who was first, on a store that accepts create-only writes and overwrites.

A decision is made in the index and then written to the store, and only then told to anybody. So whoever knows of a
decision can rely on the store, and an index that is lost takes no decision with it that anybody knows of.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from ckptd.index import Decision, DecisionIndex
from ckptstore.clock import Clock
from ckptstore.errors import CkptError, Damaged, InvalidRequest, ObjectMissing
from ckptstore.format.documents import Committed, Outcome
from ckptstore.format.parsing import parse_sealed
from ckptstore.format.records import Fate
from ckptstore.names import Attempt, RunKeys
from ckptstore.retention.tombstones import TOMBSTONE_KEPT_S
from ckptstore.stores import Store

_LOG = logging.getLogger(__name__)
_KEPT_S = 2 * TOMBSTONE_KEPT_S


class RemoteCreateDecider:
    """The arbiter of a store. For any thread, and for all daemons that share one database."""

    def __init__(self, store: Store, index: DecisionIndex, clock: Clock) -> None:
        """store: as it is, without an arbiter."""
        self._store = store
        self._index = index
        self._clock = clock

    def decide(self, key: str, proposal: bytes) -> bytes:
        """What was proposed first for `key`; it is in the store on return, or has been deleted since.

        Raises IndexUnavailable, or what the store raises: then it may be decided, and asking again tells.
        """
        found = self._index.find(key)
        if found is None:
            stored = self._stored(key)
            document = proposal if stored is None else stored
            found = self._index.create(Decision(key, document, self._clock(), stored is not None))
        self._store_if_needed(found)
        return found.document

    def finish(self) -> None:
        """Write to the store what a daemon decided and could not write; forget what nobody can contradict any more.

        Never raises CkptError.
        """
        try:
            for decision in self._index.unstored():
                self._store_if_needed(decision)
            self._index.forget(self._clock() - _KEPT_S)
        except CkptError as error:
            _LOG.warning("cannot write decisions to the store: %s", error)

    def _stored(self, key: str) -> bytes | None:
        try:
            return self._store.get(key)
        except ObjectMissing:
            return None

    def _store_if_needed(self, decision: Decision) -> None:
        # Once only: what has been swept since must not come back.
        if not decision.stored:
            self._store.put(decision.key, decision.document)
            self._index.mark_stored(decision.key)


@dataclass(frozen=True, slots=True)
class Proposal:
    """What somebody wants to be decided."""

    key: str
    """Of the object that would say so."""
    document: bytes
    manifest_key: str
    committed: Committed | None
    """What it would commit; None if it is about deleting."""

    @staticmethod
    def parse(run: str, attempt: str, tombstone: str | None, text: str) -> Proposal:
        """Raises InvalidName, or InvalidRequest if `text` is no document about this attempt or tombstone."""
        named, document = Attempt.parse(attempt), text.encode()
        manifest_key = RunKeys(run).manifest(named)
        try:
            if tombstone is None:
                outcome = parse_sealed(document, Outcome, "the proposal")
                key = RunKeys(run).outcome(named)
                fits, committed = (outcome.run, outcome.attempt) == (run, attempt), outcome.committed
            else:
                fate = parse_sealed(document, Fate, "the proposal")
                key = RunKeys(run).fate(named, tombstone)
                fits, committed = (fate.attempt, fate.tombstone) == (attempt, tombstone), None
        except Damaged as error:
            raise InvalidRequest(error.message, "Send the document as it would be stored") from error
        if not fits:
            raise InvalidRequest("the proposal is about another attempt or tombstone", "Name the one it is about")
        return Proposal(key, document, manifest_key, committed)


class RemoteCreateService:
    """Decides what is proposed over HTTP. For any thread."""

    def __init__(self, store: Store) -> None:
        """store: with its arbiter, if it needs one."""
        self._store = store

    def decide(self, proposal: Proposal) -> bytes:
        """What was decided, now or before; in the store on return.

        Raises InvalidRequest if it would commit what is not there, ObjectMissing if what was decided has been deleted
        since, or Unavailable: asking again tells.
        """
        if proposal.committed is not None and self._size(proposal.key) is None:
            expected, found = proposal.committed.bytes, self._size(proposal.manifest_key)
            if found != expected:
                where = self._store.object_url(proposal.manifest_key)
                raise InvalidRequest(
                    f"{where} has {found or 'no'} bytes, the proposal says {expected}",
                    "Does the daemon serve the store that the trainer writes to?",
                )
        if self._store.put_if_absent(proposal.key, proposal.document):
            return proposal.document
        return self._store.get(proposal.key)

    def _size(self, key: str) -> int | None:
        try:
            return self._store.size(key)
        except ObjectMissing:
            return None
