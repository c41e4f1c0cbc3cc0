from __future__ import annotations

from ckptstore.clock import system_clock
from ckptstore.format.records import Override, Policy, PolicySet
from ckptstore.names import Reference
from ckptstore.retention.deletion import list_hidden
from ckptstore.retention.pins import pin
from ckptstore.retention.policy import change_policies
from ckptstore.retention.pruning import Prune
from ckptstore.run import Run
from ckptstore.stores import Store
from tests.support.checkpoints import steps, write_checkpoint
from tests.support.daemons import running_daemon
from tests.support.waiting import wait_until

_QUICK = ("--poll-seconds", "0.2")


def _keep(store: Store, last: int, version: int = 0) -> None:
    rules = PolicySet(default=Policy(keep_last=last), overrides=(Override(runs="paper"),))
    change_policies(store, rules, version, "test", system_clock)


def test_policies_are_applied_after_each_commit_and_when_they_change(store: Store) -> None:
    run = Run(store, "gpt", by="test")
    written = [write_checkpoint(store, step=step) for step in range(4)]
    for step in range(4):
        write_checkpoint(store, "paper", step)
    pin(run, written[0].attempt, "first")
    with running_daemon(store.url, options=_QUICK) as daemon, daemon.client() as client:
        _keep(store, 3)
        wait_until(lambda: steps(store) == [3, 2, 1, 0] and len(client.checkpoints("gpt")) == 4, "indexing")
        write_checkpoint(store, step=4)
        wait_until(lambda: steps(store) == [4, 3, 2, 0], "a prune after a commit")
        wait_until(lambda: [c.step for c in client.checkpoints("gpt")] == [4, 3, 2, 0], "the index")
        _keep(store, 2, version=1)
        wait_until(lambda: steps(store) == [4, 3, 0], "a prune after a change of the policies")
        assert steps(store, "paper") == [3, 2, 1, 0]
        assert {h.attempt.step for h in list_hidden(run)} == {1, 2}, "and not deleted before the grace"
        client.undelete(Reference.parse("gpt@1"))
        assert [c.step for c in client.checkpoints("gpt")] == [4, 3, 1, 0]
        write_checkpoint(store, step=5)
        wait_until(lambda: steps(store) == [5, 4, 1, 0], "a prune that leaves what was taken back")
        wait_until(lambda: [c.step for c in client.checkpoints("gpt")] == [5, 4, 1, 0], "the index")


def test_a_limit_of_several_runs_is_applied_to_all_of_them_together(store: Store) -> None:
    for step in (1, 2, 3):
        for run in ("team/a", "team/b", "gpt"):
            write_checkpoint(store, run, step)
    team = Override(runs="team/*", rules=Policy(keep_last=5), max_bytes=1)
    change_policies(store, PolicySet(default=Policy(keep_last=5), overrides=(team,)), 0, "test", system_clock)
    with running_daemon(store.url, options=_QUICK):
        wait_until(lambda: steps(store, "team/a") == steps(store, "team/b") == [3], "the limit")
        assert steps(store, "gpt") == [3, 2, 1]


def test_a_policy_that_would_take_most_of_a_run_is_refused_and_counted(store: Store) -> None:
    for step in range(11):
        write_checkpoint(store, step=step)
    _keep(store, 2)
    with running_daemon(store.url, options=_QUICK) as daemon:
        failed = 'ckptd_policies_failed_total{code="too_much_to_delete"} 1.0'
        wait_until(lambda: failed in daemon.get("/metrics").text, "the refusal")
        assert len(steps(store)) == 11
        with daemon.client() as client:
            client.prune(Prune(run="gpt", force=True))
        assert steps(store) == [10, 9]
