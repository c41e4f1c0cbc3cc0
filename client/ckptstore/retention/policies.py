"""The retention policies of a store: versions of one document, in the store itself, so that no database owns them.

Versions are create-only: of two people who change the same version, one is told that the other was faster.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from ckptstore import names
from ckptstore.clock import Clock
from ckptstore.errors import CorruptObject, Damaged, InvalidPolicy, ObjectMissing, PoliciesChanged
from ckptstore.format.documents import FORMAT, parse_sealed, seal
from ckptstore.format.records import PoliciesVersion, PolicySet, Rules
from ckptstore.retention.judging import Best, Policy
from ckptstore.stores import Store

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
