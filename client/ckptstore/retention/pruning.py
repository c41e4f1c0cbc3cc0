"""Prunes of one or several runs: plan which checkpoints a policy does not keep, then delete them.

A prune hides these checkpoints (deletion.py). A collection sweeps them when the grace is over (deletion.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Annotated

import msgspec

from ckptstore.clock import Clock
from ckptstore.commits.catalog import Checkpoint, State, list_checkpoints, list_runs
from ckptstore.commits.labels import with_labels
from ckptstore.errors import InvalidRequest, NoCheckpoint, StoreFull, TooMuchToDelete
from ckptstore.format.records import Policy
from ckptstore.names import Attempt
from ckptstore.reading.fetch import Progress
from ckptstore.retention.deletion import hide, sweep
from ckptstore.retention.pins import active_holds
from ckptstore.retention.policy import (
    NEVER_SET,
    KeepDecision,
    evaluate,
    override_for,
    policy_for,
    read_policies,
    within_total,
)
from ckptstore.retention.scrubbing import verified_at
from ckptstore.run import Run
from ckptstore.stores import Store
from ckptstore.stores.checks import check_store
from ckptstore.threads import in_parallel
from ckptstore.values import Value

MAX_DELETE_FRACTION = 0.9
"""The largest fraction of a run that a prune removes unless a person confirmed the plan."""
SMALL_RUN = 10
"""The fraction limits only runs with more checkpoints than this."""
_PLANNERS = 8
"""Runs that are planned at a time, each with the reads of `in_parallel`."""


class Prune(Value):
    """A request to prune one run, some or all; as JSON, the body of `POST /v1/prune`."""

    rules: Policy | None = None
    """Without rules and keep_last, the policies in force apply, which may exclude runs."""
    run: str | None = None
    """A glob of run names; None: all runs."""
    grace_s: Annotated[float, msgspec.Meta(ge=0, le=365 * 24 * 3600)] | None = None
    """Time between hiding and deletion; None: the grace of the policies in force, or a day. 0: deleted immediately."""
    force: bool = False
    """A person confirmed or forced the plan: it may remove any fraction of a run."""
    keep_last: int | None = None
    """Short for rules with only keep_last."""
    dry_run: bool = True
    """Over HTTP: only plan."""

    @property
    def policy(self) -> Policy | None:
        """The policy; None for the policies in force. Raises InvalidRequest."""
        if self.keep_last is None:
            return self.rules
        if self.rules is not None:
            raise InvalidRequest("both keep_last and rules are set", "Put keep_last into the rules")
        return Policy(keep_last=self.keep_last)


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """The decisions of a prune about one or several runs; after it was applied, its result."""

    decisions: tuple[KeepDecision, ...]
    runs: tuple[str, ...] = ()
    """The runs that it covers, including those without a checkpoint."""
    grace_s: float = 0.0
    max_delete_fraction: float = MAX_DELETE_FRACTION
    reason: str = "prune"
    """For the audit log."""
    held: tuple[Checkpoint, ...] = ()
    """Not deleted, because a lease or pin was taken between planning and applying."""

    @property
    def keep(self) -> list[KeepDecision]:
        """The checkpoints that stay."""
        return [decision for decision in self.decisions if decision.reasons]

    @property
    def remove(self) -> list[Checkpoint]:
        """The checkpoints that are deleted."""
        return [d.checkpoint for d in self.decisions if not d.reasons and d.checkpoint not in self.held]

    @property
    def thin(self) -> list[Checkpoint]:
        """The checkpoints that stay without their optimizer state."""
        return [d.checkpoint for d in self.decisions if d.thins and d.checkpoint not in self.held]

    @property
    def affected(self) -> list[Checkpoint]:
        """The checkpoints that are deleted, then those that are thinned."""
        return [*self.remove, *self.thin]

    @property
    def freed_bytes(self) -> int:
        """Stored bytes of the checkpoints that are deleted, and of optimizer state that is."""
        return sum(c.stored_bytes for c in self.remove) + sum(c.optimizer_bytes for c in self.thin)

    def by_run(self) -> list[tuple[str, PrunePlan]]:
        """The plan of each run."""
        found: dict[str, list[KeepDecision]] = {run: [] for run in self.runs}
        for decision in self.decisions:
            found[decision.checkpoint.run].append(decision)
        return [(run, replace(self, decisions=tuple(decisions), runs=(run,))) for run, decisions in found.items()]

    @property
    def num_allowed(self) -> int:
        """How many checkpoints of its one run may be deleted or thinned at once without a confirmation."""
        count = len(self.decisions)
        return count if count <= SMALL_RUN else int(self.max_delete_fraction * count)

    def within_fractions(self) -> PrunePlan:
        """The same, but of each run at most `num_allowed` are affected: the newest of the others stay for now."""
        spared = set()
        for _, plan in self.by_run():
            spared.update(sorted(checkpoint.attempt for checkpoint in plan.affected)[plan.num_allowed :])
        decisions = (
            KeepDecision(d.checkpoint, d.reasons or ("for-now",)) if d.checkpoint.attempt in spared else d
            for d in self.decisions
        )
        return replace(self, decisions=tuple(decisions))

    @property
    def blocked(self) -> str:
        """Why its one run is not pruned without a confirmation: it would lose too much. Empty if it is pruned."""
        affected, count = len(self.affected), len(self.decisions)
        if affected <= self.num_allowed:
            return ""
        share = f"{affected / count:.0%}, and the limit is {self.max_delete_fraction:.0%}"
        return f"the prune would delete or thin {affected} of {count} checkpoints of run {self.runs[0]!r}: {share}"


def plan_prune(run: Run, policy: Policy) -> PrunePlan:
    """The decision about each checkpoint of one run. Deletes nothing."""
    checkpoints = with_labels(run, list_checkpoints(run))
    verified = verified_at(run)
    # Holds last: a hold that is taken while the rest is read is seen.
    return PrunePlan(tuple(evaluate(policy, checkpoints, active_holds(run), run.clock(), verified)), (run.name,))


def plan_prunes(store: Store, prune: Prune, clock: Clock) -> PrunePlan:
    """The decisions about the checkpoints of all runs of a prune. Deletes nothing.

    Raises NoCheckpoint if `prune.run` is given and no matching run has a checkpoint, InvalidRequest if neither the
    prune nor the store has a policy, or Unavailable.
    """
    own = prune.policy
    in_force = read_policies(store) if own is None or prune.grace_s is None else NEVER_SET
    if own is None and in_force is NEVER_SET:
        raise InvalidRequest("no policies are in force", "Pass a policy (--keep 5), or set policies (ckptctl policy)")
    policies = in_force.policies
    chosen = (name for name in list_runs(store) if prune.run is None or fnmatchcase(name, prune.run))
    rules = {name: policy for name in chosen if (policy := own or policy_for(policies, name)) is not None}
    plans = in_parallel(lambda name: plan_prune(Run(store, name, clock), rules[name]), rules, _PLANNERS)
    decisions = [decision for plan in plans for decision in plan.decisions]
    for override in policies.overrides if own is None else ():
        if override.max_bytes and prune.run in (None, override.runs):
            team = {name for name in rules if override_for(policies, name) is override}
            within = within_total(override.max_bytes, [d for d in decisions if d.checkpoint.run in team])
            decisions = [*(d for d in decisions if d.checkpoint.run not in team), *within]
    if prune.run is not None and not decisions:
        raise NoCheckpoint(f"no run matching {prune.run!r} has a checkpoint in {store.url}", "ckptctl runs lists them")
    return PrunePlan(
        tuple(decisions),
        tuple(rules),
        max(store.listing_lag_s, policies.grace_s if prune.grace_s is None else prune.grace_s),
        MAX_DELETE_FRACTION if own is not None else policies.max_delete_fraction,
        "prune" if own is not None else f"policies, version {in_force.version}",
    )


def check_limit(run: Run, adds: int) -> None:
    """Raises StoreFull if a limit of several runs without rules leaves no space for `adds` bytes in this one."""
    limit = override_for(read_policies(run.store).policies, run.name)
    if limit.max_bytes and limit.rules is None:
        team = (name for name in list_runs(run.store) if fnmatchcase(name, limit.runs))
        used = sum(c.stored_bytes for name in team for c in list_checkpoints(replace(run, name=name)))
        if used + adds > limit.max_bytes:
            raise StoreFull(
                f"{limit.runs} may have {limit.max_bytes} bytes: {used} are used, {adds} more do not fit",
                "Delete checkpoints (ckptctl rm), or raise the limit (ckptctl policy set)",
            )


def apply_prune(
    run: Run,
    plan: PrunePlan,
    progress: Progress = lambda _: None,
    grace_s: float = 0.0,
) -> list[Checkpoint]:
    """Hide what the plan of one run removes, optimizer state included; durable on return. A sweep deletes it after the
    grace.

    With a grace of 0 it is deleted on return. Returns those that were not deleted because something holds them now.
    Raises Unavailable: a part may be done, and a new plan continues.
    """
    thin = plan.thin
    freed = {c.attempt: c.stored_bytes for c in plan.remove} | {c.attempt: c.optimizer_bytes for c in thin}
    abandoned = [c for c in plan.remove if c.state is State.ABANDONED]
    older = [c for c in plan.remove if c.state is not State.ABANDONED]
    held = set[Attempt]()
    for chosen, why in ((older, plan.reason), (abandoned, f"{plan.reason}: abandoned"), (thin, plan.reason)):
        if attempts := [c.attempt for c in chosen]:
            held.update(hide(run, attempts, why, grace_s, lambda a: progress(freed[a]), thins=chosen is thin))
    if freed and not grace_s:
        sweep(run, only=freed.keys() - held)
    return [c for c in plan.affected if c.attempt in held]


def apply_prunes(
    store: Store,
    plan: PrunePlan,
    clock: Clock,
    by: str,
    confirmed: bool,
    progress: Progress,
    on_change: Callable[[str], object],
) -> PrunePlan:
    """Hide the checkpoints that the plan removes; durable on return. Then sweep those that were hidden and are due.

    Returns the plan with `held`: checkpoints that were not deleted because something holds them now. on_change is
    called with each run that lost a checkpoint, even if the rest fails. Raises StoreUnsafe before anything is done;
    TooMuchToDelete after all other runs were pruned, unless `confirmed`; or Unavailable after a part was done: a new
    plan continues.
    """
    check_store(store, clock)
    held: list[Checkpoint] = []
    blocked = []
    for name, part in plan.by_run():
        if part.blocked and not confirmed:
            blocked.append(part.blocked)
            continue
        run = Run(store, name, clock, by)
        try:
            held += apply_prune(run, part, progress, plan.grace_s)
            sweep(run)
        finally:
            if part.affected:
                on_change(name)
    if blocked:
        others = f"; and {len(blocked) - 1} more likewise" if blocked[1:] else ""
        raise TooMuchToDelete(
            blocked[0] + others, "Check the plan (--dry-run), then force the prune if the plan is right"
        )
    return replace(plan, held=tuple(held))
