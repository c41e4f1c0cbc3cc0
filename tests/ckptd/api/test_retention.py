from __future__ import annotations

import os
from collections.abc import Iterator

import httpx
import pytest

from ckptapi import bodies
from ckptapi.client import DaemonClient
from ckptstore.commits.catalog import list_checkpoints
from ckptstore.commits.labels import LabelChange, change_labels
from ckptstore.errors import InvalidRequest, NoCheckpoint
from ckptstore.format.records import Action, Policy
from ckptstore.names import Reference, RunKeys, new_ulid
from ckptstore.reading.verify import verify
from ckptstore.retention.pruning import Prune
from ckptstore.run import Run
from ckptstore.stores import Store
from tests.support.checkpoints import steps, write, write_checkpoint
from tests.support.daemons import Daemon, running_daemon
from tests.support.waiting import wait_until


@pytest.fixture
def watching(store: Store) -> Iterator[Daemon]:
    """It polls, over checkpoints of the steps 1, 2 and 3."""
    write(store, 1, 2, 3)
    with running_daemon(store.url) as daemon:
        yield daemon


def test_a_deletion_hides_at_once_and_is_taken_back(store: Store, watching: Daemon) -> None:
    assert httpx.delete(watching.url + "/v1/checkpoints/gpt@3?reason=diverged&force=true").status_code == 204
    assert watching.get("/v1/checkpoints/latest?run=gpt").json()["step"] == 2
    (hidden,) = watching.get("/v1/deleted?run=gpt").json()["items"]
    assert (hidden["id"].startswith("gpt@3."), hidden["reason"], steps(store)) == (True, "diverged", [2, 1])
    back = watching.post("/v1/checkpoints/gpt@3/undelete", {"reason": "it did not"})
    assert (back.status_code, back.json()["step"]) == (200, 3)
    assert watching.get("/v1/checkpoints/latest?run=gpt").json()["step"] == 3
    actions = [record["action"] for record in watching.get("/v1/audit?run=gpt").json()["items"]]
    assert actions == ["undelete", "pin", "delete"]
    assert [pin["name"] for pin in watching.get("/v1/pins?run=gpt").json()["items"]] == ["undeleted"]
    assert httpx.delete(watching.url + "/v1/checkpoints/gpt@3?force=true").json()["code"] == "checkpoint_held"
    assert len(watching.get("/v1/audit?run=gpt").json()["items"]) == 3, "what is refused was not done"
    assert watching.post("/v1/checkpoints/gpt@3/undelete", {}).json()["code"] == "no_checkpoint"


def test_policies_are_versions_and_are_applied(store: Store, watching: Daemon) -> None:
    assert watching.get(bodies.POLICIES).json()["version"] == 0
    wanted = {"expected": 0, "policies": {"default": {"keep_last": 2}, "max_delete_fraction": 1.0}, "reason": "disk"}
    put = httpx.put(watching.url + bodies.POLICIES, json=wanted)
    assert put.status_code == 200, put.text
    assert put.json()["version"] == 1
    wait_until(lambda: steps(store) == [3, 2], "the policies to be applied")
    again = httpx.put(watching.url + bodies.POLICIES, json=wanted)
    assert (again.status_code, again.json()["code"]) == (409, "conflict")
    assert [version["version"] for version in watching.get(bodies.POLICIES + "/history").json()["items"]] == [1]

    def pruned() -> list[tuple[str, int]]:
        events = watching.get("/v1/events?limit=500").json()["items"]
        return [(event["run"], event["detail"]["removed"]) for event in events if event["kind"] == "pruned"]

    wait_until(lambda: pruned() == [("gpt", 1)], "the prune, which ends after its checkpoints are hidden, to be told")


def test_what_a_token_deletes_is_recorded_under_its_name(store: Store) -> None:
    write(store, 1, 2, 3, 4)
    with running_daemon(store.url, environment={**os.environ, "CKPTD_TOKEN": "secret of the test"}) as daemon:
        with daemon.client("secret of the test") as admin:
            wanted = bodies.TokenRequest(name="janitor", scopes=[bodies.Scope.READ, bodies.Scope.PRUNE])
            secret = admin.create_token(wanted).secret
        with daemon.client(secret) as janitor:
            oldest = janitor.checkpoints("gpt")[-1]
            janitor.pin(oldest, "paper", "figure 3")
            janitor.unpin(oldest, "paper")
            janitor.delete(oldest, 3600, "diverged")
            assert janitor.undelete(Reference.parse("gpt@1"), "it did not") == oldest
            janitor.unpin(oldest, "undeleted")
            janitor.prune(Prune(Policy(3), "gpt"))
            janitor.prune(Prune(Policy(2), "gpt"))
            found = [(record.action, record.by) for record in janitor.audit("gpt")]
    done = [Action.PIN, Action.UNPIN, Action.DELETE, Action.PIN, Action.UNDELETE, Action.UNPIN, *[Action.DELETE] * 2]
    assert found == [(action, "janitor") for action in reversed(done)]


def test_labels_are_patched_listed_and_found_in_the_store(store: Store, watching: Daemon) -> None:
    run, url = Run(store, "gpt", by="ann"), watching.url + "/v1/checkpoints/gpt@2"
    body = {"tags": {"paper": "", "owner": "ann"}, "metrics": {"val_loss": 2.5}, "reason": "camera ready"}
    patched = httpx.patch(url, json=body)
    assert (patched.status_code, patched.json()["tags"]) == (200, {"owner": "ann", "paper": ""})
    patched = httpx.patch(url, json={"tags": {"paper": None}})
    assert patched.json()["metrics"]["val_loss"] == 2.5
    assert watching.get("/v1/checkpoints/gpt@2").json()["tags"] == {"owner": "ann"}
    found = {tag: watching.get(f"/v1/checkpoints?tag={tag}").json()["items"] for tag in ("owner", "owner=bob", "paper")}
    assert {tag: [item["step"] for item in items] for tag, items in found.items()} == {
        "owner": [2], "owner=bob": [], "paper": []
    }  # fmt: skip
    assert [item["step"] for item in watching.get("/v1/checkpoints?metric=val_loss<=3").json()["items"]] == [2]
    assert watching.get("/v1/audit?run=gpt").json()["items"][1]["reason"] == "camera ready"
    # Changed without the daemon: found at the next round.
    (first,) = [checkpoint for checkpoint in list_checkpoints(run) if checkpoint.step == 1]
    change_labels(run, first.attempt, LabelChange({"by": "hand"}))
    wait_until(lambda: watching.get("/v1/checkpoints/gpt@1").json()["tags"] == {"by": "hand"}, "its tags")
    assert httpx.patch(url, json={"tags": {"a b": "x"}}).json()["code"] == "invalid_request"
    assert httpx.patch(url, json={"metrics": {"loss": "much"}}).status_code == 422
    assert httpx.patch(watching.url + "/v1/checkpoints/gpt@9", json={"tags": {"a": "x"}}).status_code == 404


def test_a_dry_run_deletes_nothing_and_is_the_default(store: Store, daemon: Daemon) -> None:
    for step in range(4):
        write_checkpoint(store, step=step)
    answer = daemon.post(bodies.PRUNE, {"keep_last": 1}).json()
    assert answer["dry_run"] is True
    assert [item["reasons"] for item in answer["items"]] == [["last-1"], [], [], []]
    removed = [item["checkpoint"]["stored_bytes"] for item in answer["items"] if not item["reasons"]]
    assert answer["freed_bytes"] == sum(removed) > 0
    assert steps(store) == [3, 2, 1, 0]


def test_a_prune_works_from_the_store_and_updates_the_index(store: Store, daemon: Daemon, client: DaemonClient) -> None:
    for step in range(4):
        write_checkpoint(store, step=step)  # the index has seen none of them
    write_checkpoint(store, "bert", 1)
    assert not client.prune(Prune(Policy(2), "gpt")).held
    assert (steps(store), [c.step for c in client.checkpoints("gpt")]) == ([3, 2], [3, 2])
    client.prune(Prune(Policy(1)))
    assert (steps(store), steps(store, "bert")) == ([3], [1])
    assert "ckptd_prune_deleted_total 3.0" in daemon.get("/metrics").text


def test_prunes_that_make_no_sense(daemon: Daemon, client: DaemonClient) -> None:
    rules: list[dict[str, object]] = [{"keep_last": 0}, {"keep_last": -1}, {"rules": {}}]
    rules.append({"rules": {"keep_best": ["loss"]}})
    for keeps_nothing in rules:
        answer = daemon.post(bodies.PRUNE, {**keeps_nothing, "dry_run": False})
        assert (answer.status_code, answer.json()["code"]) == (422, InvalidRequest.code)
    with pytest.raises(NoCheckpoint):
        client.plan_prune(Prune(Policy(1), "no-such-run"))


def test_a_lease_keeps_a_checkpoint_from_a_prune(store: Store, client: DaemonClient) -> None:
    old = write_checkpoint(store, step=1)
    write_checkpoint(store, step=2)
    client.reindex()
    lease = client.take_lease(old, "rank-0@host", 60)
    pruned = client.prune(Prune(Policy(1), "gpt"))
    assert [decision.reasons for decision in pruned.decisions] == [("last-1",), ("lease:anonymous: rank-0@host",)]
    assert verify(client, old).ok
    client.release_lease("gpt", lease)
    client.release_lease("gpt", lease)
    client.prune(Prune(Policy(1), "gpt"))
    assert steps(store) == [2]
    with pytest.raises(NoCheckpoint):
        client.take_lease(old, "rank-0@host", 60)


def test_a_reader_with_a_lease_finishes_although_its_checkpoint_was_hidden(store: Store, client: DaemonClient) -> None:
    old = write_checkpoint(store, step=1)
    client.reindex()
    client.take_lease(old, "reader", 60)
    store.put(RunKeys("gpt").tombstone(old.attempt, new_ulid(0)), b"a deletion that came in between")
    client.reindex()
    assert client.checkpoints("gpt") == []
    assert verify(client, old).ok
