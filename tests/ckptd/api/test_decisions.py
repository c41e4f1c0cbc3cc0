"""The daemon decides where the store overwrites on create: a decision is final, whatever dies or asks later."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from sqlalchemy import delete
from torch.distributed import checkpoint as dcp

from ckpt.dcp import StorageWriter
from ckptapi import bodies
from ckptapi.bodies import Scope, TokenRequest
from ckptapi.client import DaemonClient
from ckptapi.remote_create import DaemonRemoteCreate, with_remote_create
from ckptd.index import Database, Decision, DecisionIndex
from ckptd.index.tables import decisions
from ckptd.services.remote_create import RemoteCreateDecider
from ckptstore.clock import system_clock
from ckptstore.commits.catalog import list_checkpoints
from ckptstore.commits.commit import commit_attempt, decide, read_outcome
from ckptstore.commits.generations import Begun, Session, begin_generation, read_generations
from ckptstore.errors import (
    AttemptAborted,
    DaemonUnavailable,
    Forbidden,
    InvalidRequest,
    ObjectMissing,
    StoreUnavailable,
    StoreUnsafe,
)
from ckptstore.format.documents import FORMAT, Generation, Outcome
from ckptstore.format.parsing import seal
from ckptstore.format.records import Policy, SweepDecision
from ckptstore.names import Attempt, RunKeys, new_ulid
from ckptstore.retention.pruning import Prune
from ckptstore.run import Run
from ckptstore.stores import Store, open_store
from ckptstore.stores.remote_create import RemoteCreateStore
from tests.conftest import on_both
from tests.support.checkpoints import keys, write_checkpoint, write_rank
from tests.support.command_line import run
from tests.support.daemons import Daemon, running_daemon
from tests.support.seaweed import S3Service
from tests.support.stores import Faults, FaultyStore, MovableClock, race
from tests.support.waiting import wait_until

RUN = "gpt"
_TOKEN = "correct horse battery staple"
_ADMIN = {"Authorization": f"Bearer {_TOKEN}"}
_CALM = ("--commit-grace-seconds", "600", "--poll-seconds", "600")


@contextmanager
def daemon_of(store: Store, gateway: S3Service, db: Path, *options: str) -> Iterator[Daemon]:
    environment = {**os.environ, **gateway.environment}
    with running_daemon(store.url, f"sqlite:///{db}", options=options, environment=environment) as daemon:
        yield daemon


@dataclass(frozen=True, slots=True)
class Honest:
    """A daemon that asks for tokens, over a folder."""

    daemon: Daemon
    store: Store


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Honest]:
    store = open_store(str(tmp_path_factory.mktemp("honest")))
    with running_daemon(store.url, options=_CALM, environment={**os.environ, "CKPTD_TOKEN": _TOKEN}) as daemon:
        yield Honest(daemon, store)


def new_attempt(step: int = 5) -> Attempt:
    return Attempt(step, new_ulid(system_clock()))


def propose(
    client: DaemonClient, run: str, about: Attempt | int, document: bytes, tombstone: str | None = None
) -> bytes:
    subject: dict[str, Any] = {"generation": about} if isinstance(about, int) else {"attempt": str(about)}
    return client.decide(bodies.DecisionRequest(run=run, tombstone=tombstone, proposal=document.decode(), **subject))


def impatient(store: Store, daemon: str) -> RemoteCreateStore:
    return RemoteCreateStore(store, DaemonRemoteCreate(store, daemon, _TOKEN, patience_s=0).decide)


# Where decisions are kept.


@pytest.fixture
def index(database: Database) -> DecisionIndex:
    return DecisionIndex(database)


@on_both
def test_the_first_proposal_counts(store: Store, index: DecisionIndex) -> None:
    decider = RemoteCreateDecider(store, index, system_clock)
    for number in range(10):
        results = race(*(partial(decider.decide, f"gpt/commits/{number}", b"%d" % me) for me in range(6)))
        assert len(set(results)) == 1, results
        assert store.get(f"gpt/commits/{number}") == results[0]


@on_both
def test_a_decision_that_cannot_be_written_is_published_later(store: Store, index: DecisionIndex) -> None:
    failing = RemoteCreateDecider(FaultyStore(store, Faults(fail_at=1)), index, system_clock)  # get, then put
    with pytest.raises(StoreUnavailable):
        failing.decide("gpt/commits/a", b"first")
    assert keys(store) == []
    RemoteCreateDecider(store, index, system_clock).finish()
    assert (store.get("gpt/commits/a"), failing.decide("gpt/commits/a", b"second")) == (b"first", b"first")


@on_both
def test_what_was_swept_is_not_written_again(store: Store, index: DecisionIndex) -> None:
    clock = MovableClock()
    decider = RemoteCreateDecider(store, index, clock)
    decider.decide("gpt/commits/a", b"first")
    store.delete_many(["gpt/commits/a"])
    assert decider.decide("gpt/commits/a", b"second") == b"first"
    decider.finish()
    assert keys(store) == []
    clock.advance(30 * 24 * 3600)
    decider.finish()
    assert index.find("gpt/commits/a") is None


@on_both
def test_the_store_counts_where_the_index_has_no_decision(store: Store, index: DecisionIndex) -> None:
    store.put("gpt/commits/a", b"before")
    assert RemoteCreateDecider(store, index, system_clock).decide("gpt/commits/a", b"after") == b"before"


class _FailsOver(DecisionIndex):
    """Whose server is lost with the first decision; a daemon of the next server decides otherwise."""

    def __init__(self, database: Database, other: RemoteCreateDecider, loses_both: bool) -> None:
        super().__init__(database)
        self.left, self.other, self.loses_both = 1, other, loses_both

    def create(self, proposal: Decision) -> Decision:
        decision = super().create(proposal)
        if self.left:
            self.left = 0
            self.lose()
            self.other.decide(proposal.key, b"other")
            if self.loses_both:
                self.lose()
        return decision

    def lose(self) -> None:
        with self._database.write() as connection:
            connection.execute(delete(decisions))


@on_both
@pytest.mark.parametrize("loses_both", [False, True])
def test_a_decision_that_a_lost_server_made_replaces_no_answer(
    store: Store, database: Database, loses_both: bool
) -> None:
    other = RemoteCreateDecider(store, DecisionIndex(database), system_clock)
    held = RemoteCreateDecider(store, _FailsOver(database, other, loses_both), system_clock)
    assert held.decide("gpt/commits/a", b"mine") == store.get("gpt/commits/a") == b"other"


# Over HTTP.


def test_a_lost_database_takes_no_decision_with_it(overwriting: Store, gateway: S3Service, tmp_path: Path) -> None:
    attempts = [new_attempt(step) for step in range(4)]
    with daemon_of(overwriting, gateway, tmp_path / "first.db", *_CALM) as daemon:
        store = with_remote_create(overwriting, daemon.url, None)
        outcomes = [decide(Run(store, RUN), attempt, None) for attempt in attempts[:2]]
        receipts = [write_rank(overwriting, RUN, attempt, {}) for attempt in attempts]
        outcomes += [commit_attempt(Run(store, RUN), [receipt]) for receipt in receipts[2:]]
        daemon.kill()
    with daemon_of(overwriting, gateway, tmp_path / "second.db", *_CALM) as daemon:
        store = with_remote_create(overwriting, daemon.url, None)
        for receipt in receipts[:2]:
            with pytest.raises(AttemptAborted):
                commit_attempt(Run(store, RUN), [receipt])
        for attempt in attempts[2:]:
            assert decide(Run(store, RUN), attempt, None).committed is not None
    assert [read_outcome(Run(overwriting, RUN), attempt) for attempt in attempts] == outcomes


def test_a_commit_needs_a_daemon_and_the_next_will_do(overwriting: Store, gateway: S3Service, tmp_path: Path) -> None:
    run, receipt = Run(overwriting, RUN), write_rank(overwriting, RUN, new_attempt(), {})
    with pytest.raises(DaemonUnavailable):
        commit_attempt(Run(impatient(overwriting, "http://127.0.0.1:9"), RUN), [receipt])
    assert list_checkpoints(run) == []
    with daemon_of(overwriting, gateway, tmp_path / "index.db") as daemon:
        wait_until(lambda: list_checkpoints(run), "a roll-forward by the daemon")
        outcome = read_outcome(run, Attempt.parse(receipt.receipt.attempt))
        assert commit_attempt(Run(with_remote_create(overwriting, daemon.url, None), RUN), [receipt]) == outcome


def test_pruning_works_through_the_daemon_only(overwriting: Store, gateway: S3Service, tmp_path: Path) -> None:
    run = Run(overwriting, RUN)
    with daemon_of(overwriting, gateway, tmp_path / "index.db") as daemon, daemon.client() as client:
        store = with_remote_create(overwriting, daemon.url, None)
        written = [write_checkpoint(store, RUN, step, {}) for step in range(3)]
        assert not client.prune(Prune(Policy(1), RUN, grace_s=0)).held
        assert list_checkpoints(run) == written[2:]
        for gone in written[:2]:
            assert not keys(overwriting, run.keys.attempt(gone.attempt))
            with pytest.raises(ObjectMissing):
                propose(client, RUN, gone.attempt, proposal(gone.attempt))


def test_trainers_at_once_get_a_generation_each(overwriting: Store, gateway: S3Service, tmp_path: Path) -> None:
    with daemon_of(overwriting, gateway, tmp_path / "index.db", *_CALM) as daemon:
        runs = [Run(with_remote_create(overwriting, daemon.url, None), RUN) for _ in range(6)]
        sessions = [Session(new_ulid(system_clock()), None) for _ in range(3)]
        raced = race(*(partial(begin_generation, run, sessions[i % 3]) for i, run in enumerate(runs)))
        numbers = [begun.number for begun in raced if isinstance(begun, Begun)]
        assert len(numbers) == len(raced), raced
        assert (numbers[:3], sorted(numbers[:3])) == (numbers[3:], [1, 2, 3])
        documents = read_generations(Run(overwriting, RUN))
        of_sessions = [sessions[numbers.index(number)].id for number in (1, 2, 3)]
        assert [document and document.session for document in documents.values()] == of_sessions


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_other_doors_ask_the_daemon_too(overwriting: Store, gateway: S3Service, tmp_path: Path) -> None:
    state = {"weight": torch.arange(8.0)}
    torch.save(state, tmp_path / "state.pt")
    with daemon_of(overwriting, gateway, tmp_path / "index.db", *_CALM) as daemon, daemon.client() as client:
        writer = StorageWriter(overwriting.url, RUN, 1, options=gateway.options, daemon=daemon.url)
        dcp.save(state, storage_writer=writer, no_dist=True)  # type: ignore[attr-defined]
        environment = {**gateway.environment, "CKPTD_URL": daemon.url}
        imported = run("import", tmp_path / "state.pt", f"{RUN}@2", "--store", overwriting.url, env=environment)
        assert imported.code == 0, imported.stderr
        written = list_checkpoints(Run(overwriting, RUN))
        assert [checkpoint.step for checkpoint in written] == [2, 1]
        for checkpoint in written:
            overwriting.delete_many([RunKeys(RUN).outcome(checkpoint.attempt)])
            with pytest.raises(ObjectMissing):  # it has been decided otherwise
                propose(client, RUN, checkpoint.attempt, proposal(checkpoint.attempt))


def test_a_daemon_of_another_store(overwriting: Store, honest: Honest) -> None:
    attempt, run = new_attempt(), Run(impatient(overwriting, honest.daemon.url), RUN)
    with pytest.raises(InvalidRequest, match="Does the daemon serve the store"):
        commit_attempt(run, [write_rank(overwriting, RUN, attempt, {})])
    with pytest.raises(StoreUnsafe, match="does not have the decision"):
        decide(run, attempt, None)
    assert read_outcome(Run(overwriting, RUN), attempt) is None


def test_an_honest_store_decides_itself(honest: Honest) -> None:
    store = honest.store
    run = Run(store, RUN)
    with honest.daemon.client(_TOKEN) as client:
        first, second = (new_attempt(step) for step in (1, 2))
        mine = decide(run, first, None)
        assert propose(client, RUN, first, proposal(first, at=1.0)) == seal(mine)
        assert propose(client, RUN, second, proposal(second, at=1.0)) == proposal(second, at=1.0)
        assert decide(run, second, None).at == 1.0
        store.delete_many([run.keys.outcome(second)])
        assert propose(client, RUN, second, proposal(second, at=2.0)) == proposal(second, at=2.0)


# What strangers may propose.


def proposal(attempt: Attempt, run: str = RUN, at: float = 1.0, **changes: Any) -> bytes:
    fields = {"run": run, "step": attempt.step, "attempt": str(attempt), "committed": None, **changes}
    nonce = "01HF7YAT00ABCDEFGHJKMNPQRS"
    return seal(Outcome(format=FORMAT, kind="outcome", nonce=nonce, by="test", at=at, **fields))


def test_proposals_that_make_no_sense(honest: Honest) -> None:
    run = Run(honest.store, RUN)
    attempt, other = new_attempt(), new_attempt()
    with honest.daemon.client(_TOKEN) as client:
        decision = seal(
            SweepDecision(
                format=FORMAT, kind="fate", attempt=str(attempt), tombstone=other.ulid, swept=True, by="test", at=1.0
            )
        )
        for tombstone, document in [
            (None, b"{}"), (None, proposal(attempt)[:-10]), (None, proposal(other)),
            (None, proposal(attempt, run="bert")), (None, decision), (attempt.ulid, decision),
            (attempt.ulid, proposal(attempt)),
        ]:  # fmt: skip
            with pytest.raises(InvalidRequest):
                propose(client, RUN, attempt, document, tombstone)
        with pytest.raises(InvalidRequest, match="has no bytes"):
            propose(client, RUN, attempt, committing(attempt)[0])
        for body in ({}, {"run": RUN, "attempt": "x", "proposal": "y"}, {"run": "../x", "attempt": str(attempt)}):
            assert honest.daemon.post(bodies.DECISIONS, body, headers=_ADMIN).status_code == 422
        big = {"run": RUN, "attempt": str(attempt), "proposal": "x" * (2 << 20)}
        assert honest.daemon.post(bodies.DECISIONS, big, headers=_ADMIN).status_code == 422
    assert read_outcome(run, attempt) is None
    assert keys(honest.store, run.keys.sweep_decisions) == []


def committing(attempt: Attempt) -> tuple[bytes, bytes]:
    """An outcome that commits the attempt, and the manifest that it needs; made elsewhere."""
    elsewhere = open_store(f"memory://{uuid.uuid4().hex}")
    run = Run(elsewhere, RUN)
    outcome = commit_attempt(run, [write_rank(elsewhere, RUN, attempt, {})])
    return seal(outcome), elsewhere.get(run.keys.manifest(attempt))


def generation(number: int, run: str = RUN) -> bytes:
    document = Generation(
        format=FORMAT, kind="generation", run=run, number=number, session=new_ulid(0.0), parent=None, by="me", at=1.0
    )
    return seal(document)


def test_who_may_propose_what(honest: Honest) -> None:
    attempt = new_attempt()
    store, daemon, runs = honest.store, honest.daemon, [RUN]
    with daemon.client(_TOKEN) as admin:
        reader = admin.create_token(TokenRequest(name="reader", scopes=[Scope.READ], runs=runs)).secret
        writer = admin.create_token(TokenRequest(name="writer", scopes=[Scope.WRITE], runs=runs)).secret
        pruner = admin.create_token(TokenRequest(name="pruner", scopes=[Scope.WRITE, Scope.PRUNE], runs=runs)).secret
    (commit, manifest), abort = committing(attempt), proposal(attempt)
    store.put(RunKeys(RUN).manifest(attempt), manifest)
    with daemon.client(reader) as client, pytest.raises(Forbidden):
        propose(client, RUN, attempt, commit)
    with daemon.client(writer) as client:
        with pytest.raises(Forbidden):
            propose(client, RUN, attempt, abort)
        with pytest.raises(Forbidden):
            propose(client, "bert", attempt, proposal(attempt, run="bert"))
        assert propose(client, RUN, attempt, commit) == commit
        first = generation(1)
        assert propose(client, RUN, 1, first) == propose(client, RUN, 1, generation(1)) == first
        with pytest.raises(InvalidRequest, match="names another"):
            propose(client, RUN, 2, first)
    with daemon.client(pruner) as client:
        assert propose(client, RUN, attempt, abort) == commit
        store.delete_many([RunKeys(RUN).outcome(attempt)])
        assert propose(client, RUN, attempt, abort) == abort


def test_who_may_write_may_abort_what_is_superseded(honest: Honest) -> None:
    """A trainer that was replaced reports `superseded`, and needs no scope of an operator for it."""
    with honest.daemon.client(_TOKEN) as admin:
        writer = admin.create_token(TokenRequest(name="saver", scopes=[Scope.WRITE], runs=["bert"])).secret
    run = Run(honest.store, "bert")
    receipt = write_rank(honest.store, "bert", (attempt := new_attempt()), {})
    honest.store.put(run.keys.generation(1), generation(1, "bert"))
    with honest.daemon.client(writer) as client:
        document = proposal(attempt, "bert")
        assert propose(client, "bert", attempt, document) == document
        later = replace(attempt, generation=1)
        with pytest.raises(Forbidden):
            propose(client, "bert", later, proposal(later, "bert"))
    with pytest.raises(AttemptAborted):
        commit_attempt(run, [receipt])
