"""Decides create-only writes for stores that ignore If-None-Match and overwrite (docs/decisions/0014).

A decision is made in the index, then written to the store, and only then returned. A process that has received a
decision can therefore rely on the store. Losing the index does not lose any decision that was returned.
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
    """Decides which document is stored. For any thread, and for all daemons that share one database."""

    def __init__(self, store: Store, index: DecisionIndex, clock: Clock) -> None:
        """store: the plain store, without remote creates."""
        self._store = store
        self._index = index
        self._clock = clock

    def decide(self, key: str, proposal: bytes) -> bytes:
        """The first document proposed for `key`; it is in the store on return, or has been deleted since.

        Raises IndexUnavailable, or an error of the store. The decision may have been made then: call again.
        """
        found = self._index.find(key)
        if found is None:
            stored = self._stored(key)
            document = proposal if stored is None else stored
            found = self._index.create(Decision(key, document, self._clock(), stored is not None))
        self._store_if_needed(found)
        return found.document

    def finish(self) -> None:
        """Write decisions to the store that a daemon could not write; delete those that can no longer be contradicted.

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
        # Only once: an object that has been swept since must not come back.
        if not decision.stored:
            self._store.put(decision.key, decision.document)
            self._index.mark_stored(decision.key)


@dataclass(frozen=True, slots=True)
class Proposal:
    """A document that a client proposes for a decision."""

    key: str
    """Key of the object that records the decision."""
    document: bytes
    manifest_key: str
    committed: Committed | None
    """The manifest that it would commit; None if the proposal is part of a deletion."""

    @staticmethod
    def parse(run: str, attempt: str, tombstone: str | None, text: str) -> Proposal:
        """Raises InvalidName, or InvalidRequest if `text` is not a document of this attempt or tombstone."""
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
            raise InvalidRequest(error.message, "Send the document exactly as it would be stored") from error
        if not fits:
            raise InvalidRequest(
                "the proposal names another attempt or tombstone", "Send the names that are in the document"
            )
        return Proposal(key, document, manifest_key, committed)


class RemoteCreateService:
    """Decides proposals that arrive over HTTP. For any thread."""

    def __init__(self, store: Store) -> None:
        """store: with remote creates, if it needs them."""
        self._store = store

    def decide(self, proposal: Proposal) -> bytes:
        """The winning document, decided now or earlier; it is in the store on return.

        Raises InvalidRequest if it would commit a manifest that is not there, ObjectMissing if the winning document
        has been deleted since, or Unavailable: the decision may have been made then, so call again.
        """
        if proposal.committed is not None and self._size(proposal.key) is None:
            expected, found = proposal.committed.bytes, self._size(proposal.manifest_key)
            if found != expected:
                where = self._store.object_url(proposal.manifest_key)
                raise InvalidRequest(
                    f"{where} has {found or 'no'} bytes, but {expected} in the proposal",
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
