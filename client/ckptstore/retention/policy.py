"""Retention: from a policy and the checkpoints of one run to the reasons why each one stays. Pure: no I/O, no clock.

A checkpoint stays if any rule gives a reason, or if something holds it. The newest one and the last one that was
found whole always stay.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from math import isfinite

from ckptstore import names
from ckptstore.clock import Clock
from ckptstore.commits.catalog import Checkpoint, State
from ckptstore.errors import CorruptObject, Damaged, InvalidPolicy, ObjectMissing, PoliciesChanged
from ckptstore.format.documents import FORMAT
from ckptstore.format.parsing import parse_sealed, seal
from ckptstore.format.records import PoliciesVersion, PolicySet, Rules
from ckptstore.names import Attempt
from ckptstore.stores import Store

_HOUR_S = 3600
_DAY_S = 24 * _HOUR_S
_PERIODS: dict[str, Callable[[float], int]] = {
    "hourly": lambda at: int(at // _HOUR_S),
    "daily": lambda at: int(at // _DAY_S),
    "weekly": lambda at: int((at // _DAY_S + 3) // 7),  # weeks begin on Monday; 1970 began on a Thursday
}


@dataclass(frozen=True, slots=True)
class Best:
    """The so many checkpoints with the best values of a metric."""

    metric: str
    highest: bool
    """Whether more is better."""
    count: int

    def __str__(self) -> str:
        return f"{self.metric}:{'max' if self.highest else 'min'}:{self.count}"

    @staticmethod
    def parse(text: str) -> Best:
        """What `str` writes: METRIC:min:N or METRIC:max:N. Raises InvalidPolicy."""
        metric, _, rest = text.rpartition(":")
        metric, _, direction = metric.rpartition(":")
        number = int(rest) if rest.isascii() and rest.isdigit() and len(rest) < 10 else 0
        if not metric or direction not in ("min", "max") or number < 1:
            raise InvalidPolicy(f"{text!r} names no best checkpoints", "Write METRIC:min:N or METRIC:max:N")
        return Best(metric, direction == "max", number)


@dataclass(frozen=True, slots=True)
class Policy:
    """What to keep of a run. A rule that is 0 or empty is not used; at least one must be. Raises InvalidPolicy."""

    keep_last: int = 0
    """The newest so many steps."""
    keep_every: int = 0
    """The first step at or after each multiple of so many steps."""
    keep_hourly: int = 0
    """The last checkpoint of each of the newest so many hours (of UTC) that have one."""
    keep_daily: int = 0
    keep_weekly: int = 0
    keep_best: tuple[Best, ...] = ()
    keep_within_s: float = 0.0
    """Everything that was committed in the last so many seconds."""
    max_bytes: int = 0
    """Not a reason but a limit: of what rules keep, or of everything if there is no other rule, the newest so many
    stored bytes."""

    def __post_init__(self) -> None:
        numbers = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "keep_best"}
        for name, value in numbers.items():
            allowed = (int, float) if name == "keep_within_s" else int
            if isinstance(value, bool) or not isinstance(value, allowed) or not 0 <= value < 1 << 62:
                raise InvalidPolicy(f"{name} cannot be {value!r}", "Use a number from 0 on; 0: not used")
        if not any(numbers.values()) and not self.keep_best:
            raise InvalidPolicy(
                "the policy keeps nothing", "Keep at least something: the last 1, every 1000, within a day ..."
            )


@dataclass(frozen=True, slots=True)
class Verdict:
    """One checkpoint and why it stays; no reasons: it goes."""

    checkpoint: Checkpoint
    reasons: tuple[str, ...]


def judge(
    policy: Policy,
    checkpoints: Sequence[Checkpoint],
    holds: Mapping[Attempt, Iterable[str]],
    now: float,
    verified: Attempt | None = None,
) -> list[Verdict]:
    """A verdict per checkpoint of one run, in the order given.

    holds: why attempts must stay whatever the policy says. verified: the one that was last found whole. Corrupt
    ones stay until somebody looks at them: what they were cannot be known, or may be worth repairing.
    """
    usable = sorted((c for c in checkpoints if c.state is State.COMMITTED), key=lambda c: c.step, reverse=True)
    reasons = _limited(policy, usable, _by_rules(policy, usable, now))
    if usable and not reasons.get(usable[0].attempt):
        reasons[usable[0].attempt] = ["newest"]

    def of(checkpoint: Checkpoint) -> Iterable[str]:
        if checkpoint.state is State.CORRUPT:
            yield "corrupt"
        yield from reasons.get(checkpoint.attempt, ())
        if checkpoint.attempt == verified:
            yield "last-verified"
        yield from holds.get(checkpoint.attempt, ())

    return [Verdict(checkpoint, tuple(of(checkpoint))) for checkpoint in checkpoints]


def _by_rules(policy: Policy, usable: Sequence[Checkpoint], now: float) -> dict[Attempt, list[str]]:
    """usable: by falling step."""
    reasons: dict[Attempt, list[str]] = defaultdict(list)
    for i, checkpoint in enumerate(usable[: policy.keep_last], 1):
        reasons[checkpoint.attempt].append(f"last-{i}")
    for checkpoint in _first_of_each(policy.keep_every, usable):
        reasons[checkpoint.attempt].append(f"every-{policy.keep_every}")
    by_age = sorted(usable, key=lambda c: (c.committed_at, c.step), reverse=True)
    for period, bucket in _PERIODS.items():
        last_of: dict[int, Checkpoint] = {}
        for checkpoint in by_age:
            last_of.setdefault(bucket(checkpoint.committed_at), checkpoint)
        for i, checkpoint in enumerate(list(last_of.values())[: getattr(policy, f"keep_{period}")], 1):
            reasons[checkpoint.attempt].append(f"{period}-{i}")
    for best in policy.keep_best:
        for i, checkpoint in enumerate(_ranked(best, usable)[: best.count], 1):
            reasons[checkpoint.attempt].append(f"best-{best.metric}-{i}")
    for checkpoint in usable:
        if policy.keep_within_s and now - checkpoint.committed_at <= policy.keep_within_s:
            reasons[checkpoint.attempt].append("within")
    return reasons


def _first_of_each(every: int, usable: Sequence[Checkpoint]) -> list[Checkpoint]:
    """The lowest step from each multiple up to the next one. Before the first multiple only step 0 counts."""
    if not every:
        return []
    first = {c.step // every: c for c in usable if c.step >= every or c.step == 0}
    return list(first.values())


def _ranked(best: Best, usable: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Those that have the metric, the best first; of equal ones the newer."""
    have = [c for c in usable if isfinite(c.metrics.get(best.metric, float("nan")))]
    return sorted(have, key=lambda c: c.metrics[best.metric], reverse=best.highest)


def _limited(
    policy: Policy, usable: Sequence[Checkpoint], reasons: dict[Attempt, list[str]]
) -> dict[Attempt, list[str]]:
    """The reasons of the newest that fit into `max_bytes` together."""
    if not policy.max_bytes:
        return reasons
    if policy == Policy(max_bytes=policy.max_bytes):
        reasons = {c.attempt: ["fits"] for c in usable}
    total = 0
    for checkpoint in usable:
        if reasons.get(checkpoint.attempt):
            total += checkpoint.stored_bytes
            if total > policy.max_bytes:
                reasons[checkpoint.attempt] = []
    return reasons


_MAX_OVERRIDES = 1000
_MAX_GRACE_S = 365 * 24 * 3600.0


def policy_of(rules: Rules) -> Policy:
    """The policy that stored rules spell. Raises InvalidPolicy."""
    return Policy(
        keep_last=rules.keep_last,
        keep_every=rules.keep_every,
        keep_hourly=rules.keep_hourly,
        keep_daily=rules.keep_daily,
        keep_weekly=rules.keep_weekly,
        keep_best=tuple(map(Best.parse, rules.keep_best)),
        keep_within_s=rules.keep_within_s,
        max_bytes=rules.max_bytes,
    )


def rules_of(policy: Policy) -> Rules:
    """A policy as it is stored and sent."""
    return Rules(
        keep_last=policy.keep_last,
        keep_every=policy.keep_every,
        keep_hourly=policy.keep_hourly,
        keep_daily=policy.keep_daily,
        keep_weekly=policy.keep_weekly,
        keep_best=tuple(map(str, policy.keep_best)),
        keep_within_s=policy.keep_within_s,
        max_bytes=policy.max_bytes,
    )


def policy_for(policies: PolicySet, run: str) -> Policy | None:
    """What to keep of a run; None: it is never pruned. Pure."""
    for override in policies.overrides:
        if fnmatchcase(run, override.runs):
            return policy_of(override.rules) if override.rules is not None else None
    return policy_of(policies.default) if policies.default is not None else None


def check_policies(policies: PolicySet) -> None:
    """Return if the policies make sense. Raises InvalidPolicy."""
    if len(policies.overrides) > _MAX_OVERRIDES:
        raise InvalidPolicy(f"{len(policies.overrides)} overrides are too many", f"Up to {_MAX_OVERRIDES}; use globs")
    for override in policies.overrides:
        if not 0 < len(override.runs) <= 128:
            raise InvalidPolicy(f"{override.runs!r} is no glob of runs", "Write one like exp-*")
    for rules in (policies.default, *(override.rules for override in policies.overrides)):
        if rules is not None:
            policy_of(rules)
    if not 0 <= policies.grace_s <= _MAX_GRACE_S:
        raise InvalidPolicy(f"grace_s cannot be {policies.grace_s}", "Use 0 seconds to a year")
    if not 0 < policies.max_delete_fraction <= 1:
        raise InvalidPolicy(f"max_delete_fraction cannot be {policies.max_delete_fraction}", "Use 0 to 1, without 0")


def read_policies(store: Store) -> PoliciesVersion | None:
    """The policies in force; None if there never were any.

    Raises Damaged if the newest version cannot be read: an older one is no substitute, it may delete more.
    """
    versions = _versions(store)
    return _read(store, versions[-1]) if versions else None


def policies_history(store: Store, limit: int = 100) -> list[PoliciesVersion]:
    """The newest versions, the newest first. Those that are damaged are left out."""
    found = []
    for version in reversed(_versions(store)[-limit:]):
        try:
            found.append(_read(store, version))
        except (Damaged, ObjectMissing):
            continue
    return found


def change_policies(
    store: Store, policies: PolicySet, expected: int, by: str, clock: Clock, reason: str = ""
) -> PoliciesVersion:
    """Put new policies in force; durable on return.

    expected: the version they were made from, 0 for none. Raises InvalidPolicy, or PoliciesChanged if that is not
    the newest any more.
    """
    check_policies(policies)
    versions = _versions(store)
    newest = versions[-1] if versions else 0
    if newest != expected:
        raise _changed(expected, newest)
    document = PoliciesVersion(
        format=FORMAT, kind="policies", version=expected + 1, policies=policies, by=by, at=clock(), reason=reason
    )
    if store.put_if_absent(names.policies_key(document.version), seal(document)):
        return document
    # Refused: by another writer, or by our own object after a lost reply.
    stored = _read(store, document.version)
    if stored != document:
        raise _changed(expected, document.version)
    return stored


def _changed(expected: int, newest: int) -> PoliciesChanged:
    return PoliciesChanged(
        f"the policies are at version {newest}, not {expected}", "Look at the new version, then change that"
    )


def _versions(store: Store) -> list[int]:
    stems = (info.key.removeprefix(names.POLICIES_PREFIX) for info in store.list(names.POLICIES_PREFIX))
    numbers = (stem.removesuffix(".json") for stem in stems)
    return sorted(int(number) for number in numbers if number.isascii() and number.isdigit() and len(number) == 8)


def _read(store: Store, version: int) -> PoliciesVersion:
    key = names.policies_key(version)
    found = parse_sealed(store.get(key), PoliciesVersion, store.object_url(key))
    try:
        check_policies(found.policies)
    except InvalidPolicy as error:
        raise CorruptObject(f"{store.object_url(key)}: {error.message}") from error
    if found.version != version:
        raise CorruptObject(f"{store.object_url(key)} is another version of the policies")
    return found
