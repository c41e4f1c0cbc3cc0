from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore import names
from ckptstore.clock import system_clock
from ckptstore.commits.catalog import Checkpoint, State
from ckptstore.errors import Conflict, CorruptObject, InvalidRequest, StoreUnavailable
from ckptstore.format.documents import FORMAT, Document
from ckptstore.format.parsing import seal
from ckptstore.format.records import Best, Override, Policy, PolicySet
from ckptstore.names import Attempt, new_ulid
from ckptstore.retention.policy import (
    PoliciesInForce,
    change_policies,
    evaluate,
    policies_history,
    policy_for,
    read_policies,
    within_total,
)
from ckptstore.stores import Store
from tests.support.stores import Faults, FaultyStore, race

ROOT = Path(__file__).parents[3]
DAY_S = 86400.0
MONDAY = 1_700_438_400.0  # 2023-11-20 00:00 UTC
NOW = MONDAY + 10 * DAY_S


def checkpoint(
    step: int, at: float = MONDAY, state: State = State.COMMITTED, stored: int = 100, **metrics: float
) -> Checkpoint:
    return Checkpoint(
        "gpt", Attempt(step, new_ulid(at)), state, written_at=at, stored_bytes=stored, metrics=metrics,
        thinned=state is State.THINNED,
    )  # fmt: skip


def reasons(policy: Policy, *checkpoints: Checkpoint, **more: Any) -> dict[int, tuple[str, ...]]:
    verdicts = evaluate(policy, checkpoints, more.pop("holds", {}), more.pop("now", NOW), **more)
    return {v.checkpoint.step: v.reasons for v in verdicts if v.reasons}


def test_last_counts_steps_that_are_whole() -> None:
    listed = [
        checkpoint(9, state=State.CORRUPT), checkpoint(8), checkpoint(8, state=State.SUPERSEDED), checkpoint(7),
        checkpoint(6),
    ]  # fmt: skip
    held = {listed[4].attempt: ["lease:restore"], listed[1].attempt: ["lease:restore", "pin:paper"]}
    found = [verdict.reasons for verdict in evaluate(Policy(2), listed, held, NOW)]
    assert found == [("corrupt",), ("last-1", "lease:restore", "pin:paper"), (), ("last-2",), ("lease:restore",)]


def test_every_takes_the_first_step_from_each_multiple_on() -> None:
    steps = [0, 300, 900, 1000, 1200, 1900, 2100, 2900, 3000, 3100]
    found = reasons(Policy(keep_every=1000), *(checkpoint(step) for step in reversed(steps)))
    assert found == {**dict.fromkeys((0, 1000, 2100, 3000), ("every-1000",)), 3100: ("newest",)}
    assert reasons(Policy(keep_every=1000), checkpoint(300), checkpoint(200)) == {300: ("newest",)}


def test_what_every_keeps_does_not_change_when_training_goes_on() -> None:
    policy, kept = Policy(keep_every=1000), {}
    for step in range(0, 10_000, 70):
        kept[step] = checkpoint(step)
        found = reasons(policy, *kept.values())
        kept = {s: c for s, c in kept.items() if s in found}
    assert sorted(kept) == [0, 1050, 2030, 3010, 4060, 5040, 6020, 7000, 8050, 9030, 9940]


def test_hours_days_and_weeks_keep_their_last() -> None:
    hour = 3600.0
    listed = [checkpoint(step, MONDAY - 3 * DAY_S + step * 6 * hour) for step in range(20)]  # Friday to Tuesday
    assert reasons(Policy(keep_daily=3), *listed) == {19: ("daily-1",), 15: ("daily-2",), 11: ("daily-3",)}
    assert reasons(Policy(keep_weekly=9), *listed) == {19: ("weekly-1",), 11: ("weekly-2",)}
    close = [checkpoint(step, MONDAY + step * 1200) for step in range(6)]
    assert reasons(Policy(keep_hourly=5), *close) == {5: ("hourly-1",), 2: ("hourly-2",)}


def test_best_ranks_by_a_metric_and_prefers_the_newer() -> None:
    values = {1: 0.5, 2: 0.3, 3: 0.3, 4: float("nan"), 5: 0.9}
    listed = [checkpoint(step, loss=value) for step, value in values.items()] + [checkpoint(6)]
    assert reasons(Policy(keep_best=("loss:min:2",)), *listed) == {
        3: ("best-loss-1",), 2: ("best-loss-2",), 6: ("newest",),
    }  # fmt: skip
    assert reasons(Policy(keep_best=("loss:max:1",)), *listed) == {5: ("best-loss-1",), 6: ("newest",)}


def test_within_looks_at_the_moment_of_the_commit() -> None:
    """A checkpoint without a time in the store counts as just written."""
    listed = [checkpoint(1, NOW - 100), checkpoint(2, NOW - 61), checkpoint(3, NOW - 60), checkpoint(4, NOW - 1)]
    assert set(reasons(Policy(keep_within_s=60), *listed)) == {3, 4}
    listed = [checkpoint(1, 0.0), checkpoint(2, NOW - 61), checkpoint(3, NOW - DAY_S)]
    found = reasons(Policy(keep_within_s=60, keep_daily=1), *listed)
    assert found == {1: ("daily-1", "within"), 3: ("newest",)}


def test_bytes_limit_what_rules_keep_and_alone_keep_the_newest_that_fit() -> None:
    listed = [checkpoint(step) for step in range(5)]
    assert reasons(Policy(max_bytes=250), *listed) == {4: ("fits",), 3: ("fits",)}
    assert reasons(Policy(keep_last=4, max_bytes=250), *listed) == {4: ("last-1",), 3: ("last-2",)}
    assert reasons(Policy(keep_every=2, max_bytes=250), *listed) == {4: ("every-2",), 2: ("every-2",)}
    assert reasons(Policy(max_bytes=1), *listed) == {4: ("newest",)}


def test_all_rules_together_give_all_reasons_and_the_last_verified_stays() -> None:
    policy = Policy(keep_last=1, keep_every=10, keep_best=("loss:min:1",), keep_within_s=5)
    only = checkpoint(10, NOW, loss=1.0)
    assert reasons(policy, only, verified={only.attempt}) == {
        10: ("last-1", "every-10", "best-loss-1", "within", "last-verified")
    }
    listed = [checkpoint(step) for step in range(5)]
    verified = {c.attempt for c in listed[:2]}
    assert reasons(Policy(1), *listed, verified=verified) == {4: ("last-1",), 1: ("last-verified",)}


def thinned_steps(policy: Policy, *checkpoints: Checkpoint, **more: Any) -> dict[int, bool]:
    """Of the checkpoints that stay: whether their optimizer state is deleted."""
    decided = evaluate(policy, checkpoints, more.pop("holds", {}), NOW, **more)
    return {one.checkpoint.step: one.thins for one in decided if one.reasons}


def test_full_ones_are_few_and_weights_stay() -> None:
    listed = [replace(checkpoint(step), optimizer_bytes=60) for step in range(9, -1, -1)]
    policy = Policy(keep_full=2, keep_weights="all")
    assert thinned_steps(policy, *listed) == {step: step < 8 for step in range(10)}
    assert reasons(policy, *listed)[9] == ("full-1", "weights-1")
    assert thinned_steps(Policy(keep_full=2), *listed) == {9: False, 8: False}
    assert thinned_steps(Policy(keep_full=2, keep_weights=3), *listed) == {9: False, 8: False, 7: True}
    assert thinned_steps(Policy(keep_full=1, keep_every=4), *listed) == {9: False, 8: True, 4: True, 0: True}
    assert thinned_steps(Policy(keep_every=4, keep_weights="4"), *listed) == {
        9: False, 8: False, 7: True, 6: True, 4: False, 0: False
    }  # fmt: skip
    held = {listed[3].attempt: ["pin:paper"], listed[4].attempt: ["referenced:x"], listed[5].attempt: ["optimizer:x"]}
    found = thinned_steps(policy, *listed, holds=held, verified={listed[9].attempt})
    assert [step for step, thins in found.items() if not thins] == [9, 8, 6, 4, 0]


def test_the_newest_full_one_is_never_thinned() -> None:
    thinned = [checkpoint(step, state=State.THINNED) for step in (9, 8)]
    full = [replace(checkpoint(step), optimizer_bytes=60) for step in (7, 6)]
    assert thinned_steps(Policy(keep_weights=2), *thinned, *full) == {9: False, 8: False, 7: False}
    assert reasons(Policy(keep_weights=2), *thinned, *full)[7] == ("newest",)


def test_a_checkpoint_without_a_file_of_optimizer_state_stays_full_and_says_so() -> None:
    rules = Policy(keep_full=1, keep_weights="all")
    undivided, divided = [checkpoint(step) for step in (5, 4)], replace(checkpoint(3), optimizer_bytes=60)
    assert thinned_steps(rules, *undivided, divided) == {5: False, 4: False, 3: True}
    assert reasons(rules, *undivided, divided) == {
        5: ("full-1", "weights-1"), 4: ("weights-2", "undivided"), 3: ("weights-3",),
    }  # fmt: skip
    assert reasons(Policy(keep_full=1), *undivided) == {5: ("full-1",)}, "it is no reason to stay"
    assert reasons(Policy(keep_full=1, keep_weights=1, keep_last=2), *undivided)[4] == ("last-2", "undivided")
    assert reasons(Policy(keep_last=2, keep_weights=2), *undivided)[4] == ("last-2", "weights-2"), (
        "a rule keeps it full"
    )
    held = {undivided[1].attempt: ["pin:paper"]}
    assert reasons(rules, *undivided, holds=held)[4] == ("weights-2", "pin:paper")
    limited = Policy(keep_full=1, keep_weights="all", max_bytes=150)
    assert reasons(limited, *undivided) == {5: ("full-1", "weights-1")}
    kept = [*evaluate(rules, undivided, {}, NOW)]
    assert [d.reasons for d in within_total(100, kept)] == [("full-1", "weights-1"), ()]


def test_bytes_are_limited_as_they_will_be() -> None:
    listed = [replace(checkpoint(step), optimizer_bytes=80) for step in (3, 2, 1)]
    assert thinned_steps(Policy(keep_full=1, keep_weights="all", max_bytes=140), *listed) == {
        3: False,
        2: True,
        1: True,
    }
    assert thinned_steps(Policy(keep_full=1, keep_weights="all", max_bytes=120), *listed) == {3: False, 2: True}


@pytest.mark.parametrize("wrong", ["some", "-1", True, 1.5])
def test_a_number_of_weights_is_a_number_or_all(wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match="keep_weights"):
        Policy(keep_weights=wrong)


def test_abandoned_checkpoints_stay_for_a_time_and_count_for_no_other_rule() -> None:
    left = [replace(checkpoint(step, state=State.ABANDONED), abandoned_at=NOW - step * DAY_S) for step in (6, 7, 8)]
    unknown = checkpoint(90, state=State.ABANDONED)
    live = [checkpoint(5), checkpoint(4), checkpoint(3)]
    assert reasons(Policy(2), *left, unknown, *live) == {
        5: ("last-1",), 4: ("last-2",), **dict.fromkeys((6, 7, 90), ("abandoned-within",)),
    }  # fmt: skip
    kept = reasons(Policy(max_bytes=250, keep_abandoned_s=7.5 * DAY_S), *left, *live)
    assert kept.keys() == {5, 4, 6, 7}, "they are not counted, and the limit is a rule of its own without others"
    kept = reasons(Policy(2, keep_abandoned_s=0), *left, unknown, *live)
    assert kept.keys() == {5, 4, 90}, "it is not known when it was left behind"
    with pytest.raises(InvalidRequest):
        Policy(keep_abandoned_s=60)


def test_the_newest_healthy_ones_stay_and_unknown_ones_only_if_there_are_too_few() -> None:
    listed = [replace(checkpoint(step), not_finite=bad) for step, bad in ((5, 3), (4, None), (3, 0), (2, 0), (1, 7))]
    assert reasons(Policy(keep_healthy=1), *listed) == {5: ("newest",), 3: ("healthy-1",)}
    many = reasons(Policy(keep_healthy=4), *listed)
    assert many == {5: ("newest",), 4: ("healthy-3",), 3: ("healthy-1",), 2: ("healthy-2",)}
    assert reasons(Policy(keep_healthy=1), *listed[:2]) == {5: ("newest",), 4: ("healthy-1",)}


@pytest.mark.parametrize("keep", [0, -1, True, 1.5, "3", None, 10**30])
def test_a_policy_that_keeps_nothing_or_nonsense_is_refused(keep: object) -> None:
    with pytest.raises(InvalidRequest):
        Policy(keep)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "loss", "a:min", "a:mean:1", "a:min:0", ":min:1", "a:min:x", "a:max:-1"])
def test_what_names_no_best(text: str) -> None:
    assert Best.parse("val:loss:min:3") == Best("val:loss", False, 3), "a metric may have a colon"
    with pytest.raises(InvalidRequest):
        Best.parse(text)


policies = st.builds(
    Policy,
    keep_last=st.integers(1, 5),
    keep_every=st.integers(0, 20),
    keep_hourly=st.integers(0, 3),
    keep_daily=st.integers(0, 3),
    keep_weekly=st.integers(0, 3),
    keep_best=st.lists(st.sampled_from(["loss:min:1", "loss:max:1", "loss:min:3"]), max_size=2).map(tuple),
    keep_within_s=st.floats(0, 1e6),
    keep_abandoned_s=st.floats(0, 1e6),
    max_bytes=st.integers(0, 2000),
)
runs = st.lists(
    st.builds(
        checkpoint, st.integers(0, 60), st.floats(MONDAY, NOW), st.sampled_from(State), st.integers(0, 500),
        loss=st.floats(allow_nan=True),
    ),
    max_size=25,
)  # fmt: skip


@given(policies, runs)
def test_for_any_policy_and_run(policy: Policy, listed: list[Checkpoint]) -> None:
    verdicts = evaluate(policy, listed, {}, NOW)
    assert [v.checkpoint for v in verdicts] == listed
    usable = [v for v in verdicts if v.checkpoint.state is State.COMMITTED]
    if usable:
        newest = max(usable, key=lambda v: v.checkpoint.step)
        assert any(v.reasons for v in usable if v.checkpoint.step == newest.checkpoint.step)
    for verdict in verdicts:
        assert verdict.checkpoint.state is not State.SUPERSEDED or not verdict.reasons
        assert verdict.checkpoint.state is not State.CORRUPT or verdict.reasons == ("corrupt",)
    assert msgspec.json.decode(msgspec.json.encode(policy), type=Policy) == policy


@pytest.mark.parametrize("rule", ["keep_abandoned", "keep_healthy", "keep_within", "keep_hourly"])
def test_a_rule_is_in_few_files(rule: str) -> None:
    """Options, the policy file and the API come from the struct: a new rule needs the struct and its evaluation."""
    files = [path for folder in ("client", "ckptd") for path in (ROOT / folder).rglob("*.py")]
    assert 1 <= sum(rule in path.read_text() for path in files) <= 4


SET = PolicySet(
    default=Policy(keep_last=5, keep_every=1000),
    overrides=(Override(runs="exp-*", rules=Policy(keep_best=("loss:min:2",))), Override(runs="*-paper")),
)


def test_the_first_override_that_matches_counts() -> None:
    assert policy_for(SET, "gpt") == Policy(5, keep_every=1000)
    assert policy_for(SET, "exp-paper") == Policy(keep_best=("loss:min:2",))
    assert policy_for(SET, "my-paper") is None
    assert policy_for(PolicySet(), "gpt") is None


def test_versions_follow_one_another(store: Store) -> None:
    assert read_policies(store) == PoliciesInForce(version=0, policies=PolicySet())
    first = change_policies(store, SET, 0, "ann", system_clock, "we run out of space")
    assert read_policies(store) == first
    second = change_policies(store, PolicySet(), 1, "ben", system_clock)
    assert (read_policies(store), second.version) == (second, 2)
    assert policies_history(store, 100) == [second, first]
    with pytest.raises(Conflict, match="version 2, not 1"):
        change_policies(store, SET, 1, "ann", system_clock)


def test_of_many_who_change_one_version_one_wins(store: Store) -> None:
    for version in range(10):
        change = [partial(change_policies, store, SET, version, f"p{i}", system_clock) for i in range(4)]
        results = race(*change)
        winners = [result for result in results if isinstance(result, PoliciesInForce)]
        assert len(winners) == 1, results
        assert sum(isinstance(result, Conflict) for result in results) == 3
        assert read_policies(store) == winners[0]


def test_a_lost_reply_is_settled_by_another_look(store: Store) -> None:
    faulty = FaultyStore(store, Faults(1, "after"))
    with pytest.raises(StoreUnavailable):
        change_policies(faulty, SET, 0, "ann", system_clock)
    assert read_policies(store).policies == SET


def test_damaged_policies_are_not_replaced_by_older_ones(store: Store) -> None:
    first = change_policies(store, SET, 0, "ann", system_clock)
    store.put(names.policies_key(2), b"noise")
    with pytest.raises(CorruptObject):
        read_policies(store)
    assert policies_history(store, 100) == [first]
    assert change_policies(store, SET, 2, "ann", system_clock).version == 3


class _Unchecked(Document, frozen=True):
    """A PoliciesVersion whose policies are not checked."""

    format: int
    kind: str
    version: int
    policies: dict[str, object]
    by: str
    at: float
    reason: str


def test_sealed_nonsense_is_damage(store: Store) -> None:
    empty: dict[str, object] = {"default": {"keep_last": 0}}
    document = _Unchecked(format=FORMAT, kind="policies", version=1, policies=empty, by="", at=0.0, reason="")
    store.put(names.policies_key(1), seal(document))
    with pytest.raises(CorruptObject, match="keeps nothing"):
        read_policies(store)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: PolicySet(default=Policy()),
        lambda: PolicySet(default=Policy(keep_last=-1)),
        lambda: PolicySet(default=Policy(keep_best=("loss",))),
        lambda: PolicySet(overrides=(Override(runs="", rules=None),)),
        lambda: PolicySet(overrides=(Override(runs="*"),) * 1001),
        lambda: PolicySet(grace_s=-1),
        lambda: PolicySet(max_delete_fraction=0),
        lambda: PolicySet(max_delete_fraction=1.5),
    ],
)
def test_policies_that_make_no_sense(store: Store, wrong: Callable[[], PolicySet]) -> None:
    with pytest.raises(InvalidRequest):
        change_policies(store, wrong(), 0, "ann", system_clock)
    assert read_policies(store).version == 0
