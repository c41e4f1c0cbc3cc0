"""Policies in the store: versions, overrides, and two people who change the same one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from ckptstore import names
from ckptstore.clock import system_clock
from ckptstore.errors import Conflict, CorruptObject, InvalidRequest, StoreUnavailable
from ckptstore.format.documents import FORMAT, Document
from ckptstore.format.parsing import seal
from ckptstore.format.records import Override, PoliciesVersion, Policy, PolicySet
from ckptstore.retention.policy import change_policies, policies_history, policy_for, read_policies
from ckptstore.stores import Store
from tests.support.stores import Faults, FaultyStore, race

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
    assert read_policies(store) is None
    first = change_policies(store, SET, 0, "ann", system_clock, "we run out of space")
    assert read_policies(store) == first
    second = change_policies(store, PolicySet(), 1, "ben", system_clock)
    assert (read_policies(store), second.version) == (second, 2)
    assert policies_history(store) == [second, first]
    with pytest.raises(Conflict, match="version 2, not 1"):
        change_policies(store, SET, 1, "ann", system_clock)


def test_of_many_who_change_one_version_one_wins(store: Store) -> None:
    for version in range(10):
        change = [partial(change_policies, store, SET, version, f"p{i}", system_clock) for i in range(4)]
        results = race(*change)
        winners = [result for result in results if isinstance(result, PoliciesVersion)]
        assert len(winners) == 1, results
        assert sum(isinstance(result, Conflict) for result in results) == 3
        assert read_policies(store) == winners[0]


def test_a_lost_reply_is_settled_by_another_look(store: Store) -> None:
    faulty = FaultyStore(store, Faults(1, "after"))
    with pytest.raises(StoreUnavailable):
        change_policies(faulty, SET, 0, "ann", system_clock)
    found = read_policies(store)
    assert found is not None
    assert found.policies == SET


def test_damaged_policies_are_not_replaced_by_older_ones(store: Store) -> None:
    first = change_policies(store, SET, 0, "ann", system_clock)
    store.put(names.policies_key(2), b"noise")
    with pytest.raises(CorruptObject):
        read_policies(store)
    assert policies_history(store) == [first]
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
    assert read_policies(store) is None
