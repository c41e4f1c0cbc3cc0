"""Retention policies: why each checkpoint of a run stays, and the versions of the policies in the store.

A checkpoint stays if any rule gives a reason or if something holds it. The newest one with optimizer state and the one
that was last verified as intact always stay. `evaluate` is pure: no I/O, no clock.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from msgspec.structs import asdict

from ckptstore import names
from ckptstore.clock import Clock
from ckptstore.commits.catalog import Checkpoint, State, ranked
from ckptstore.errors import Conflict, CorruptObject, Damaged, InvalidRequest, ObjectMissing
from ckptstore.format.decoding import convert
from ckptstore.format.documents import FORMAT
from ckptstore.format.parsing import parse_sealed, seal
from ckptstore.format.records import Best, Override, PoliciesVersion, Policy, PolicySet
from ckptstore.names import Attempt
from ckptstore.retention.pins import Reasons, holds_optimizer
from ckptstore.stores import Store
from ckptstore.values import Record

_HOUR_S = 3600
_DAY_S = 24 * _HOUR_S
_PERIODS: dict[str, Callable[[float], int]] = {
    "hourly": lambda at: int(at // _HOUR_S),
    "daily": lambda at: int(at // _DAY_S),
    "weekly": lambda at: int((at // _DAY_S + 3) // 7),  # weeks begin on Monday; 1970 began on a Thursday
}


class KeepDecision(NamedTuple):
    """A checkpoint and the reasons why it stays; without any reason it is deleted."""

    checkpoint: Checkpoint
    reasons: tuple[str, ...]
    thins: bool = False
    """It stays, and its optimizer state is deleted."""

    @property
    def why_removed(self) -> str:
        """Why a checkpoint without reasons is deleted: abandoned, superseded or older."""
        state = self.checkpoint.state
        return state if state in (State.ABANDONED, State.SUPERSEDED) else "older"


def evaluate(
    policy: Policy,
    checkpoints: Sequence[Checkpoint],
    holds: Mapping[Attempt, Iterable[str]],
    now: float,
    verified: Collection[Attempt] = (),
) -> list[KeepDecision]:
    """The decision about each checkpoint of one run, in the given order.

    holds: why attempts must stay regardless of the policy. now: by the store's clock, like `Checkpoint.written_at`.
    verified: attempts that were found intact; the newest of these checkpoints stays. Corrupt ones stay until an
    operator examines them: their metrics may be unknown, and a repair may be possible. The rules count the live
    lineage. An abandoned checkpoint stays for `keep_abandoned_s`, and for as long as it is not known when it was left
    behind.
    """
    usable = sorted((c for c in checkpoints if c.live), key=lambda c: c.attempt, reverse=True)
    whole = [c for c in usable if not c.thinned]
    reasons = _by_rules(policy, usable, now)
    last_verified = max((c.attempt for c in checkpoints if c.attempt in verified), default=None)
    full = {last_verified, *(c.attempt for c in whole[: max(1, policy.keep_full)])}
    full.update(a for a, why in holds.items() if holds_optimizer(why))
    thinned = set[Attempt]()
    for c in whole:
        why = reasons.get(c.attempt)
        if why and c.attempt not in full and (policy.keep_full or all(r.startswith("weights-") for r in why)):
            if c.optimizer_bytes:
                thinned.add(c.attempt)
            else:  # it would free nothing: the optimizer state has no shard of its own
                why.append("undivided")
    reasons = _limited(policy, usable, reasons, thinned)
    if whole and not reasons.get(whole[0].attempt):
        reasons[whole[0].attempt] = ["newest"]

    def of(checkpoint: Checkpoint) -> Iterable[str]:
        if checkpoint.state is State.CORRUPT:
            yield checkpoint.state
        left_at = checkpoint.abandoned_at
        if checkpoint.state is State.ABANDONED and (left_at is None or 0 < policy.keep_abandoned_s >= now - left_at):
            yield "abandoned-within"
        yield from reasons.get(checkpoint.attempt, ())
        if checkpoint.attempt == last_verified:
            yield "last-verified"
        yield from holds.get(checkpoint.attempt, ())

    decided = ((checkpoint, tuple(of(checkpoint))) for checkpoint in checkpoints)
    return [KeepDecision(c, why, bool(why) and c.attempt in thinned) for c, why in decided]


def _by_rules(policy: Policy, usable: Sequence[Checkpoint], now: float) -> Reasons:
    """The reasons that the rules give. usable: newest generation and step first."""
    reasons: Reasons = defaultdict(list)

    def keep(rule: str, ranked: Sequence[Checkpoint]) -> None:
        for i, checkpoint in enumerate(ranked, 1):
            reasons[checkpoint.attempt].append(f"{rule}-{i}")

    keep("last", usable[: policy.keep_last])
    keep("full", [c for c in usable if not c.thinned][: policy.keep_full])
    keep("weights", usable[: policy.most_weights])
    if every := policy.keep_every:
        # The lowest step from each multiple up to the next. Before the first multiple only step 0 qualifies.
        first = {c.step // every: c for c in usable if c.step >= every or c.step == 0}
        for checkpoint in first.values():
            reasons[checkpoint.attempt].append(f"every-{every}")
    # By the store's clock: the committers' clocks may differ. Without a listing, a checkpoint counts as just written.
    written = {checkpoint.attempt: checkpoint.written_at or now for checkpoint in usable}
    by_age = sorted(usable, key=lambda c: (written[c.attempt], c.step), reverse=True)
    for period, bucket in _PERIODS.items():
        last_of: dict[int, Checkpoint] = {}
        for checkpoint in by_age:
            last_of.setdefault(bucket(written[checkpoint.attempt]), checkpoint)
        keep(period, list(last_of.values())[: getattr(policy, f"keep_{period}")])
    for best in map(Best.parse, policy.keep_best):
        keep(f"best-{best.metric}", ranked(best, usable)[: best.count])
    keep("healthy", healthiest(usable)[: policy.keep_healthy])
    for checkpoint in usable:
        if policy.keep_within_s and now - written[checkpoint.attempt] <= policy.keep_within_s:
            reasons[checkpoint.attempt].append("within")
    return reasons


def healthiest(usable: Sequence[Checkpoint]) -> list[Checkpoint]:
    """The checkpoints without NaN and Inf, newest first; then those of which it is not known."""
    return sorted((c for c in usable if not c.not_finite), key=lambda c: c.not_finite is None)


def _limited(policy: Policy, usable: Sequence[Checkpoint], reasons: Reasons, thinned: Collection[Attempt]) -> Reasons:
    """The reasons, without those of checkpoints that exceed `max_bytes`, counted from the newest.

    thinned: those that lose their optimizer state now.
    """
    if not policy.max_bytes:
        return reasons
    if policy == Policy(max_bytes=policy.max_bytes, keep_abandoned_s=policy.keep_abandoned_s):
        reasons = {c.attempt: ["fits"] for c in usable}
    total = 0
    for checkpoint in usable:
        if reasons.get(checkpoint.attempt):
            total += checkpoint.stored_bytes - checkpoint.optimizer_bytes * (checkpoint.attempt in thinned)
            if total > policy.max_bytes:
                reasons[checkpoint.attempt] = []
    return reasons


_MAX_OVERRIDES = 1000
_MAX_GRACE_S = 365 * 24 * 3600.0


def policy_for(policies: PolicySet, run: str) -> Policy | None:
    """The policy of a run; None: it is never pruned. Pure."""
    return override_for(policies, run).rules


def override_for(policies: PolicySet, run: str) -> Override:
    """The first override that matches a run; the default rules if none does. Pure."""
    matching = (override for override in policies.overrides if fnmatchcase(run, override.runs))
    return next(matching, Override(runs="*", rules=policies.default))


_BY_RULE = re.compile(r"(last|every|hourly|daily|weekly|best-.+|healthy|full|weights)-[0-9]+|within|fits|undivided")


def within_total(max_bytes: int, decisions: Sequence[KeepDecision]) -> list[KeepDecision]:
    """The decisions about several runs, in the same order, with as many of the newest checkpoints as fit. Pure.

    The newest checkpoint of a run, and what stays for another reason than a rule, counts first and stays.
    """
    newest = {d.checkpoint.run: d.checkpoint for d in reversed(decisions) if d.checkpoint.state is State.COMMITTED}

    def is_firm(decision: KeepDecision) -> bool:
        c = decision.checkpoint
        return newest.get(c.run) is c or not all(map(_BY_RULE.fullmatch, decision.reasons))

    kept, beyond = [decision for decision in decisions if decision.reasons], set()
    for decision in sorted(kept, key=lambda d: (is_firm(d), d.checkpoint.written_at), reverse=True):
        max_bytes -= decision.checkpoint.stored_bytes - decision.checkpoint.optimizer_bytes * decision.thins
        if max_bytes < 0 and not is_firm(decision):
            beyond.add(decision.checkpoint.id)
    return [KeepDecision(d.checkpoint, ()) if d.checkpoint.id in beyond else d for d in decisions]


def check_policies(policies: PolicySet) -> None:
    """Raises InvalidRequest if a value is not allowed."""
    if len(policies.overrides) > _MAX_OVERRIDES:
        raise InvalidRequest(f"{len(policies.overrides)} overrides are too many", f"Use at most {_MAX_OVERRIDES}")
    for override in policies.overrides:
        if not 0 < len(override.runs) <= 128:
            raise InvalidRequest(f"{override.runs!r} is not a glob of runs", "Use 1 to 128 characters, such as exp-*")
    if not 0 <= policies.grace_s <= _MAX_GRACE_S:
        raise InvalidRequest(f"grace_s cannot be {policies.grace_s}", "Use 0 to 31536000 seconds (a year)")
    if not 0 < policies.max_delete_fraction <= 1:
        raise InvalidRequest(f"max_delete_fraction cannot be {policies.max_delete_fraction}", "Use a number in (0, 1]")


class PoliciesInForce(Record):
    """One version of the policies; version 0: policies were never set."""

    version: int
    policies: PolicySet
    by: str = ""
    at: float = 0.0
    reason: str = ""


NEVER_SET = PoliciesInForce(version=0, policies=PolicySet())


def read_policies(store: Store) -> PoliciesInForce:
    """The policies in force; version 0 if policies were never set.

    Raises Damaged if the newest version cannot be read: an older version must not replace it, as it may delete more.
    """
    versions = _versions(store)
    return _read(store, versions[-1]) if versions else NEVER_SET


def policies_history(store: Store, limit: int) -> list[PoliciesInForce]:
    """The newest versions, newest first. Damaged versions are left out."""
    found = []
    for version in reversed(_versions(store)[-limit:]):
        try:
            found.append(_read(store, version))
        except (Damaged, ObjectMissing):
            continue
    return found


def change_policies(
    store: Store, policies: PolicySet, expected: int, by: str, clock: Clock, reason: str = ""
) -> PoliciesInForce:
    """Put new policies in force; durable on return.

    expected: the version that they replace, 0 for none. Raises InvalidRequest, or Conflict if that is not the
    newest version.
    """
    check_policies(policies)
    newest = max(_versions(store), default=0)
    if newest == expected:
        newest += 1
        wanted = PoliciesInForce(version=newest, policies=policies, by=by, at=clock(), reason=reason)
        document = PoliciesVersion(format=FORMAT, kind="policies", **asdict(wanted))
        # Refused: by another writer, or by our own object after a lost reply.
        if store.put_if_absent(names.policies_key(newest), seal(document)) or _read(store, newest) == wanted:
            return wanted
    raise Conflict(
        f"the policies are at version {newest}, not {expected}", "Read the new version and apply the change to it"
    )


def _versions(store: Store) -> list[int]:
    prefix = names.POLICIES_PREFIX
    numbers = (info.key.removeprefix(prefix).removesuffix(".json") for info in store.list(prefix))
    return sorted(int(number) for number in numbers if number.isascii() and number.isdigit() and len(number) == 8)


def _read(store: Store, version: int) -> PoliciesInForce:
    key = names.policies_key(version)
    found = parse_sealed(store.get(key), PoliciesVersion, store.object_url(key))
    try:
        check_policies(found.policies)
    except InvalidRequest as error:
        raise CorruptObject(f"{store.object_url(key)}: {error.message}") from error
    if found.version != version:
        raise CorruptObject(f"{store.object_url(key)} is another version of the policies")
    return convert(found, PoliciesInForce, from_attributes=True)
