"""The invariants of docs/explanation/architecture.md, over the objects in the store and what the actors claim."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.protocol.actors import dead
from tests.protocol.table import Claim, Key, Value

WHOLE = "a checkpoint that is visible, or that an undelete can bring back, has all of its data"
STAYS = "a confirmed commit stays until a deletion is decided"
AGREE = "no attempt is reported as committed and as aborted"
HELD = "data that a lease, a pin or an undelete holds is not deleted"
LISTED = "what a lease or pin holds is not hidden"
BACK = "an undelete that succeeded stays"
DEAD = "what was swept or aborted is never visible again"
ALONE = "a generation belongs to one trainer"
LAST = "the last save of a step counts, also if another process commits it"
FULL = "a checkpoint that is listed as full, or that an undelete can make full again, has its optimizer state"
RESUMED = "optimizer state that a lease of who resumes holds is not deleted"
LATEST = "latest is in the newest generation that has a commit"


class Invariants:
    """Of a scenario whose attempts have these shards. references: an attempt to the one whose chunks it needs."""

    def __init__(
        self,
        shards: Mapping[str, Sequence[str]],
        references: Mapping[str, str] | None = None,
        by_step: bool = False,
        earlier: Mapping[str, str] | None = None,
        optimizers: Mapping[str, str] | None = None,
    ) -> None:
        self._shards = shards
        self._references = references or {}
        self._by_step = by_step
        self._optimizers = optimizers or {}
        """An attempt with optimizer state of its own, to the one whose optimizer state it needs; empty: none."""
        self._earlier = earlier or {}
        """An attempt to the save of its step before it."""

    def __call__(self, objects: Mapping[Key, Value], claims: Sequence[Claim]) -> str | None:
        """The first invariant that does not hold."""
        visible = {a for a in self._shards if self.visible(objects, a)}
        if any(not self._whole(objects, a) for a in self._shards if a in visible or self._recoverable(objects, a)):
            return WHOLE
        seen = {a for a in self._optimizers if a in visible or self._recoverable(objects, a)}
        if any(self._can_be_full(objects, a) and not self._full(objects, a) for a in seen):
            return FULL
        for a, before in self._earlier.items():
            if objects.get(("commits", a)) == "committed" and ("commits", before) not in objects:
                return LAST  # it may still be committed, later
        swept = {claim[1] for claim in claims if claim[0] == "swept"}
        for claim in claims:
            if broken := self._check(objects, claim, claims, visible, swept) or self._check_thin(objects, claim, swept):
                return broken
        return self._check_latest(visible, claims)

    def visible(self, objects: Mapping[Key, Value], a: str) -> bool:
        """What every reader sees."""
        hidden = any(key[0] == "tombstones" and key[1] == a for key in objects)
        return objects.get(("commits", a)) == "committed" and not hidden and a not in dead(objects)

    def _recoverable(self, objects: Mapping[Key, Value], a: str) -> bool:
        """Hidden, and no tombstone is decided as swept."""
        swept = any(key[:2] == ("fates", a) and value == "swept" for key, value in objects.items())
        return objects.get(("commits", a)) == "committed" and not swept and a not in dead(objects)

    def _whole(self, objects: Mapping[Key, Value], a: str) -> bool:
        base = self._references.get(a)
        own = all(("attempts", a, f"shard {r}") in objects for r in self._shards[a])
        return own and (base is None or self._whole(objects, base))

    def _check_thin(self, objects: Mapping[Key, Value], claim: Claim, swept: set[str]) -> str | None:
        kind, a = claim[:2]
        if kind == "resuming" and objects.get(("leases", a, claim[2])) == "live" and not self._full(objects, a):
            return RESUMED
        return BACK if kind == "full again" and a not in swept and ("thinnings", a, "thinned") in objects else None

    @staticmethod
    def _can_be_full(objects: Mapping[Key, Value], a: str) -> bool:
        """Not thinned, and no thinning is decided as swept."""
        ids = [key[2] for key in objects if key[:2] == ("thinnings", a)]
        return "thinned" not in ids and not any(objects.get(("fates", a, id)) == "swept" for id in ids)

    def _full(self, objects: Mapping[Key, Value], a: str) -> bool:
        base = self._optimizers[a]
        return ("attempts", a, "optimizer 0") in objects and (not base or self._full(objects, base))

    def _check(
        self, objects: Mapping[Key, Value], claim: Claim, claims: Sequence[Claim], visible: set[str], swept: set[str]
    ) -> str | None:
        kind, a = claim[:2]
        gone = any(key[:2] == ("tombstones", a) for key in objects) or a in swept
        if kind == "confirmed":
            if not gone and a not in visible:
                return STAYS
            if ("aborted", a) in claims:
                return AGREE
        if kind == "reading" and objects.get(("leases", a, claim[2])) == "live" and not self._whole(objects, a):
            return HELD
        if kind == "pinned" and not self._whole(objects, a):
            return HELD
        if kind == "hidden" and ("tombstones", a, claim[2]) in objects and self._held(objects, a, claims):
            return LISTED
        if kind == "undeleted" and not gone and a not in visible:
            return BACK
        if kind == "undeleted" and any(("swept", a, id) in claims for id in claim[2:]):
            return BACK
        if kind in ("swept", "aborted") and a in visible:
            return DEAD
        return None

    @staticmethod
    def _held(objects: Mapping[Key, Value], a: str, claims: Sequence[Claim]) -> bool:
        leases = [claim[2] for claim in claims if claim[:2] == ("reading", a)]
        return ("pinned", a, "paper") in claims or any(objects.get(("leases", a, id)) == "live" for id in leases)

    def _check_latest(self, visible: set[str], claims: Sequence[Claim]) -> str | None:
        """Attempts are named GENERATION-STEP-TRAINER."""
        confirmed = {claim[1] for claim in claims if claim[0] == "confirmed" and claim[1].count("-") == 2}
        if not confirmed:
            return None
        order = (lambda a: a.split("-")[1]) if self._by_step else (lambda a: a)
        latest = max(visible, key=order, default="")
        if any(a[0] == b[0] and a[-1] != b[-1] for a in confirmed for b in confirmed):
            return ALONE
        # Of the trainers that have committed, the one that began last.
        return None if latest[:1] >= max(confirmed)[:1] else LATEST
