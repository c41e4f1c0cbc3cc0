"""One prune of one run, some or all: by a policy that is given, or by the policies in force. Plan, then apply.

The command line on a store and the daemon do the same, here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ckptstore.clock import Clock
from ckptstore.commits.catalog import Checkpoint, list_runs
from ckptstore.commits.store_check import check_store
from ckptstore.errors import InvalidPolicy, NoCheckpoint
from ckptstore.format.records import PolicySet
from ckptstore.retention.deletion import MAX_DELETE_FRACTION, PrunePlan, apply_prune, plan_prune
from ckptstore.retention.policy import Policy, policy_for, read_policies
from ckptstore.retention.tombstones import SWEEP_GRACE_S, sweep
from ckptstore.run import Run
from ckptstore.stores import Store

POLICIES_IN_FORCE = "the policies in force"


@dataclass(frozen=True, slots=True)
class Prune:
    """What somebody wants to be pruned."""

    policy: Policy | None = None
    """None: the policies in force, which may leave runs alone."""
    runs: str | None = None
    """A glob; None: all."""
    grace_s: float | None = None
    """Between hiding and deleting; None: what the policies in force say, or a day. 0: gone for good at once."""
    looked_at: bool = False
    """Somebody has seen the plan, or forces it: it may remove any part of a run."""


@dataclass(frozen=True, slots=True)
class PrunePlans:
    """What a prune would do to each run, and how."""

    plans: tuple[PrunePlan, ...]
    grace_s: float
    max_delete_fraction: float
    reason: str

    @property
    def remove(self) -> list[Checkpoint]:
        """All that would go."""
        return [checkpoint for plan in self.plans for checkpoint in plan.remove]

    def check_fractions(self) -> None:
        """Raises TooMuchToDelete if a run would lose more at once than is allowed without looking."""
        for plan in self.plans:
            plan.check_fraction(self.max_delete_fraction)


def plan_prunes(store: Store, prune: Prune, clock: Clock) -> PrunePlans:
    """What would go and what would stay, run by run. Deletes nothing.

    Raises NoCheckpoint if runs are named and none of them has a checkpoint, InvalidPolicy if there is no policy, or
    Unavailable.
    """
    in_force = read_policies(store) if prune.policy is None or prune.grace_s is None else None
    if prune.policy is None and in_force is None:
        raise InvalidPolicy("no policies are in force", "Say what to keep (--keep 5), or set policies (ckptctl policy)")
    policies = in_force.policies if in_force is not None else PolicySet(grace_s=SWEEP_GRACE_S)
    plans = []
    for run in list_runs(store):
        policy = prune.policy or policy_for(policies, run)
        if policy is not None and (prune.runs is None or fnmatchcase(run, prune.runs)):
            plans.append(plan_prune(Run(store, run, clock), policy))
    if prune.runs is not None and not any(plan.verdicts for plan in plans):
        raise NoCheckpoint(f"no run {prune.runs!r} to prune has a checkpoint in {store.url}", "ckptctl runs shows them")
    own = prune.policy is not None
    return PrunePlans(
        tuple(plans),
        policies.grace_s if prune.grace_s is None else prune.grace_s,
        MAX_DELETE_FRACTION if own else policies.max_delete_fraction,
        "prune" if own or in_force is None else f"policies, version {in_force.version}",
    )


def apply_prunes(
    store: Store,
    planned: PrunePlans,
    clock: Clock,
    by: str,
    looked_at: bool = False,
    progress: Callable[[Checkpoint], None] = lambda _: None,
    after_run: Callable[[str], None] = lambda _: None,
) -> Sequence[Checkpoint]:
    """Hide what is planned to go; durable on return. Then delete for good what was hidden before for its grace.

    Returns those that were spared because something held them by now. after_run is called with each run that lost
    something, also if the rest fails. Raises TooMuchToDelete, unless somebody `looked_at` it, StoreUnsafe or
    ClockSkew: then nothing was done; or Unavailable: then a part was, and a new plan goes on.
    """
    if not looked_at:
        planned.check_fractions()
    check_store(store, clock)
    spared: list[Checkpoint] = []
    for plan in planned.plans:
        try:
            run = Run(store, plan.run, clock, by)
            spared += apply_prune(run, plan, progress, planned.grace_s, planned.reason)
            sweep(run)
        finally:
            if plan.remove:
                after_run(plan.run)
    return spared
