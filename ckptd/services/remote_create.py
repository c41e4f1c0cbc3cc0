"""Decides create-only writes for stores that ignore If-None-Match and overwrite (docs/decisions/0014).

A decision is made in the index, then written to the store, and only then returned. A process that has received a
decision can therefore rely on the store. Losing the index does not lose any decision that was returned.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import NamedTuple

from ckptapi.bodies import DecisionRequest
from ckptd.index import Decision, DecisionIndex
from ckptstore.clock import Clock
from ckptstore.commits.generations import superseded_by
from ckptstore.errors import CkptError, Damaged, InvalidRequest, ObjectMissing
from ckptstore.format.documents import Committed, Generation, Outcome
from ckptstore.format.parsing import parse_sealed
from ckptstore.format.records import SweepDecision
from ckptstore.names import Attempt, RunKeys
from ckptstore.retention.deletion import TOMBSTONE_KEPT_S
from ckptstore.run import Run
from ckptstore.stores import Store

_LOG = logging.getLogger(__name__)
_KEPT_S = 2 * TOMBSTONE_KEPT_S


@dataclass
class RemoteCreateDecider:
    """Decides which document is stored. For any thread, and for all daemons that share one database."""

    _store: Store
    """The plain store, without remote creates."""
    _index: DecisionIndex
    _clock: Clock

    def decide(self, key: str, proposal: bytes) -> bytes:
        """The first document proposed for `key`; it is in the store on return, or has been deleted since.

        Raises IndexUnavailable, or an error of the store. The decision may have been made then: call again.
        """
        found = self._index.find(key)
        if found is None:
            found = self._create(Decision(key, proposal, self._clock(), False))
        return self._stored(found)

    def finish(self) -> None:
        """Write decisions to the store that a daemon could not write; delete those that can no longer be contradicted.

        Never raises CkptError.
        """
        try:
            for decision in self._index.unstored():
                self._stored(decision)
            self._index.forget(self._clock() - _KEPT_S)
        except CkptError as error:
            _LOG.warning("cannot write decisions to the store: %s", error)

    def _create(self, proposal: Decision) -> Decision:
        stored = self._store.find(proposal.key)
        return self._index.create(proposal if stored is None else proposal._replace(document=stored, stored=True))

    def _stored(self, decision: Decision) -> bytes:
        """The document of a decision; it is in the store on return."""
        if not decision.stored:
            # Again, from the server that takes writes now: the one that gave the decision may have lost it.
            decision = self._create(decision)
        # Only once: an object that has been swept since must not come back.
        if not decision.stored:
            self._store.put(decision.key, decision.document)
            self._index.mark_stored(decision.key)
        return decision.document


class Proposal(NamedTuple):
    """A document that a client proposes for a decision."""

    key: str
    """Key of the object that records the decision."""
    document: bytes
    manifest_key: str
    committed: Committed | None
    """The manifest that it would commit; None if it would commit none."""
    deletes: bool
    """Whether it is part of a deletion."""
    run: str = ""
    aborts: Attempt | None = None
    """The attempt that it would abort."""

    @staticmethod
    def parse(request: DecisionRequest) -> Proposal:
        """Raises InvalidName, or InvalidRequest if the proposal is not a document of what the request names."""
        document = request.proposal.encode()
        try:
            if request.generation is not None:
                return _of_generation(request.run, request.generation, document)
            return _of_attempt(request.run, request.attempt, request.tombstone, document)
        except Damaged as error:
            raise InvalidRequest(error.message, "Send the document exactly as it would be stored") from error

    def is_superseded(self, store: Store) -> bool:
        """Whether it only aborts an attempt that must not be committed any more: a newer generation has begun."""
        return self.aborts is not None and superseded_by(Run(store, self.run), self.aborts.generation) is not None

    def decide(self, store: Store) -> bytes:
        """The winning document, decided now or earlier; it is in the store on return. store: with remote creates, if
        it needs them.

        Raises InvalidRequest if it would commit a manifest that is not there, ObjectMissing if the winning document
        has been deleted since, or Unavailable: the decision may have been made then, so call again.
        """
        if self.committed is not None and _size(store, self.key) is None:
            expected, found = self.committed.bytes, _size(store, self.manifest_key)
            if found != expected:
                raise InvalidRequest(
                    f"{store.object_url(self.manifest_key)} has {found or 'no'} bytes, but {expected} in the proposal",
                    "Does the daemon serve the store that the trainer writes to?",
                )
        return self.document if store.put_if_absent(self.key, self.document) else store.get(self.key)


def _of_generation(run: str, number: int, document: bytes) -> Proposal:
    found = parse_sealed(document, Generation, "the proposal")
    _check_fits((found.run, found.number) == (run, number))
    return Proposal(RunKeys(run).generation(number), document, "", None, deletes=False)


def _of_attempt(run: str, attempt: str, tombstone: str | None, document: bytes) -> Proposal:
    named, keys = Attempt.parse(attempt), RunKeys(run)
    if tombstone is not None:
        decision = parse_sealed(document, SweepDecision, "the proposal")
        _check_fits((decision.attempt, decision.tombstone) == (attempt, tombstone))
        return Proposal(keys.sweep_decision(named, tombstone), document, "", None, deletes=True)
    outcome = parse_sealed(document, Outcome, "the proposal")
    _check_fits((outcome.run, outcome.attempt) == (run, attempt))
    aborts = named if outcome.committed is None else None
    return Proposal(
        keys.outcome(named), document, keys.manifest(named), outcome.committed, aborts is not None, run, aborts
    )


def _check_fits(fits: bool) -> None:
    if not fits:
        raise InvalidRequest(
            "the proposal names another attempt, tombstone or generation", "Send the names that are in the document"
        )


def _size(store: Store, key: str) -> int | None:
    try:
        return store.size(key)
    except ObjectMissing:
        return None
