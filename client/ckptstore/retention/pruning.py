"""A prune of one run, of some or of all: plan what a policy does not keep, then delete it.

It hides what the policy does not keep (tombstones.py). A collection sweeps it when the grace is over (deletion.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from ckptstore.clock import Clock
from ckptstore.commits.catalog import Checkpoint, list_checkpoints, list_runs
from ckptstore.commits.labels import with_labels
from ckptstore.commits.store_check import check_store
from ckptstore.errors import InvalidPolicy, NoCheckpoint, TooMuchToDelete
from ckptstore.format.records import Policy, PolicySet
from ckptstore.retention.pins import active_holds
from ckptstore.retention.policy import KeepDecision, evaluate, policy_for, read_policies
from ckptstore.retention.scrubbing import last_verified
from ckptstore.retention.tombstones import SWEEP_GRACE_S, hide, sweep
from ckptstore.run import Run
from ckptstore.stores import Store

POLICIES_IN_FORCE = "the policies in force"
MAX_DELETE_FRACTION = 0.9
"""The largest part of a run that a prune removes unless a person confirmed the plan."""


@dataclass(frozen=True, slots=True)
class Prune:
    """A request to prune."""

    policy: Policy | None = None
    """None: the policies in force, which may leave runs alone."""
    runs: str | None = None
    """A glob; None: all."""
    grace_s: float | None = None
    """Between hiding and deleting; None: the grace of the policies in force, or a day. 0: deleted at once."""
    confirmed: bool = False
    """A person confirmed or forced the plan: it may remove any part of a run."""


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """What a prune would do to one run or several; after it was applied, what it did."""

    decisions: tuple[KeepDecision, ...]
    runs: tuple[str, ...] = ()
    """The runs it covers, also those without a checkpoint."""
    grace_s: float = 0.0
    max_delete_fraction: float = MAX_DELETE_FRACTION
    reason: str = "prune"
    """For the audit log."""
    held: tuple[Checkpoint, ...] = ()
    """Spared when the plan was applied, because a lease or pin had been taken since it was made."""

    @property
    def keep(self) -> list[KeepDecision]:
        """The checkpoints that stay."""
        return [decision for decision in self.decisions if decision.reasons]

    @property
    def remove(self) -> list[Checkpoint]:
        """The checkpoints that go."""
        return [d.checkpoint for d in self.decisions if not d.reasons and d.checkpoint not in self.held]

    @property
    def freed_bytes(self) -> int:
        """Stored bytes of the checkpoints that go."""
        return sum(checkpoint.stored_bytes for checkpoint in self.remove)

    def by_run(self) -> list[tuple[str, PrunePlan]]:
        """The plan of each run."""
        found: dict[str, list[KeepDecision]] = {run: [] for run in self.runs}
        for decision in self.decisions:
            found[decision.checkpoint.run].append(decision)
        return [(run, replace(self, decisions=tuple(decisions), runs=(run,))) for run, decisions in found.items()]

    def check_fractions(self) -> None:
        """Raises TooMuchToDelete if a run would lose a larger part of its checkpoints than is allowed."""
        for run, plan in self.by_run():
            share = len(plan.remove) / max(1, len(plan.decisions))
            if share > self.max_delete_fraction:
                raise TooMuchToDelete(
                    f"{len(plan.remove)} of the {len(plan.decisions)} checkpoints of run {run!r} would go: "
                    f"{share:.0%}, and {self.max_delete_fraction:.0%} are allowed",
                    "Look at the plan (--dry-run), then force it if it is meant",
                )


def plan_prune(run: Run, policy: Policy) -> PrunePlan:
    """What would go and what would stay of one run, and why. Deletes nothing."""
    checkpoints = with_labels(run, list_checkpoints(run))
    verified = last_verified(run, checkpoints)
    # Holds last: a hold that is taken while the rest is read is seen.
    return PrunePlan(tuple(evaluate(policy, checkpoints, active_holds(run), run.clock(), verified)), (run.name,))


def plan_prunes(store: Store, prune: Prune, clock: Clock) -> PrunePlan:
    """What would go and what would stay, run by run. Deletes nothing.

    Raises NoCheckpoint if runs are named and none of them has a checkpoint, InvalidPolicy if there is no policy, or
    Unavailable.
    """
    in_force = read_policies(store) if prune.policy is None or prune.grace_s is None else None
    if prune.policy is None and in_force is None:
        raise InvalidPolicy("no policies are in force", "Say what to keep (--keep 5), or set policies (ckptctl policy)")
    policies = in_force.policies if in_force is not None else PolicySet(grace_s=SWEEP_GRACE_S)
    decisions: list[KeepDecision] = []
    runs: list[str] = []
    for name in list_runs(store):
        policy = prune.policy or policy_for(policies, name)
        if policy is not None and (prune.runs is None or fnmatchcase(name, prune.runs)):
            decisions += plan_prune(Run(store, name, clock), policy).decisions
            runs.append(name)
    if prune.runs is not None and not decisions:
        raise NoCheckpoint(f"no run {prune.runs!r} to prune has a checkpoint in {store.url}", "ckptctl runs shows them")
    own = prune.policy is not None
    return PrunePlan(
        tuple(decisions),
        tuple(runs),
        policies.grace_s if prune.grace_s is None else prune.grace_s,
        MAX_DELETE_FRACTION if own else policies.max_delete_fraction,
        "prune" if own or in_force is None else f"policies, version {in_force.version}",
    )


def apply_prune(
    run: Run,
    plan: PrunePlan,
    progress: Callable[[Checkpoint], None] = lambda _: None,
    grace_s: float = 0.0,
    reason: str = "prune",
) -> list[Checkpoint]:
    """Hide what the plan of one run removes, and delete it after the grace; durable on return.

    Without a grace it is deleted on return. Returns those that were spared because something held them by now. Raises
    Unavailable: part of it may be done then, and a new plan goes on.
    """
    remove = {checkpoint.attempt: checkpoint for checkpoint in plan.remove}
    if not remove:
        return []
    held = hide(run, [*remove], reason, grace_s, lambda attempt: progress(remove[attempt]))
    if not grace_s:
        sweep(run, only=remove.keys() - held.keys())
    return [remove[attempt] for attempt in held]


def apply_prunes(
    store: Store,
    plan: PrunePlan,
    clock: Clock,
    by: str,
    confirmed: bool = False,
    progress: Callable[[Checkpoint], None] = lambda _: None,
    on_change: Callable[[str], object] = lambda _: None,
) -> PrunePlan:
    """Hide what is planned to go; durable on return. Then delete what was hidden earlier and is due.

    Returns the plan with what was spared because something held it by now. on_change is called with each run that lost
    something, also if the rest fails. Raises TooMuchToDelete unless `confirmed`, StoreUnsafe or ClockSkew: then nothing
    was done; or Unavailable: then a part was, and a new plan goes on.
    """
    if not confirmed:
        plan.check_fractions()
    check_store(store, clock)
    held: list[Checkpoint] = []
    for name, part in plan.by_run():
        run = Run(store, name, clock, by)
        try:
            held += apply_prune(run, part, progress, plan.grace_s, plan.reason)
            sweep(run)
        finally:
            if part.remove:
                on_change(name)
    return replace(plan, held=tuple(held))
