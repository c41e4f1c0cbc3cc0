"""Labels: tags and further metrics of a checkpoint, which people and evaluation jobs add after its commit.

A commit is never rewritten. Labels are stored separately, as versions of one create-only object. Of two writers that
change the same version one is refused, and applies its change to the new version. The highest version is valid; lower
ones are removed when it is durable.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from math import isfinite

from ckptstore.commits import audit, catalog
from ckptstore.commits.catalog import Checkpoint, decided_attempts
from ckptstore.commits.hidden import hidden_attempts
from ckptstore.errors import Damaged, InvalidRequest, NoCheckpoint, ObjectMissing, StoreUnavailable
from ckptstore.format.documents import oldest_format
from ckptstore.format.parsing import seal
from ckptstore.format.records import Action, Labels
from ckptstore.names import Attempt, Reference
from ckptstore.run import Run
from ckptstore.threads import in_parallel
from ckptstore.values import Value

MAX_LABELS = 64
"""Maximum number of tags of a checkpoint, and of metrics."""

ARCHIVED = "archived"
"""The tag of the newest checkpoint with which a run is left out of lists of all runs."""

_LOG = logging.getLogger(__name__)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,63}")
_VALUE = re.compile(r"[^\x00-\x1f\x7f]{0,256}")
_TRIES = 20


class LabelChange(Value):
    """Tags and metrics to set, or to remove if None. A removed metric gets the value that was saved."""

    tags: Mapping[str, str | None] = {}
    metrics: Mapping[str, float | None] = {}

    def check(self) -> None:
        """Raises InvalidRequest if a name or a value is not allowed."""
        for name in (*self.tags, *self.metrics):
            if not _NAME.fullmatch(name):
                raise InvalidRequest(
                    f"{name[:80]!r} cannot name a tag or a metric",
                    "Use 1 to 64 letters, digits, '.', '_', '/' or '-', starting with a letter or digit",
                )
        for name, value in self.tags.items():
            if value is not None and not _VALUE.fullmatch(value):
                raise InvalidRequest(f"the value of tag {name!r} is not allowed", "Use up to 256 printable characters")
        for name, number in self.metrics.items():
            if number is not None and not isfinite(number):
                raise InvalidRequest(f"metric {name!r} cannot be {number}", "Use a finite number")


def change_labels(run: Run, attempt: Attempt, change: LabelChange, reason: str = "") -> Labels:
    """Change the labels of a checkpoint; durable on return. Concurrent changes are all applied.

    Raises InvalidRequest, or NoCheckpoint if the checkpoint is being deleted.
    """
    change.check()
    audit.record(run, Action.LABEL, [attempt], reason or _describe(change))
    for _ in range(_TRIES):
        versions = label_versions(run).get(attempt, [])
        try:
            before = _read(run, attempt, versions[-1]) if versions else None
        except ObjectMissing:
            continue  # another writer was faster
        after = _apply(attempt, before, change, run.by, run.clock())
        key = run.keys.labels_version(attempt, after.version)
        if run.store.put_if_absent(key, seal(after)) or run.read_intact(key, Labels) == after:
            # After a lost reply the winner looks like the loser: the stored object decides.
            if max(label_versions(run).get(attempt, [0])) > after.version:
                # This version had been removed because a later one exists, which does not include this change.
                run.store.delete_many([key])
                continue
            run.store.delete_many(run.keys.labels_version(attempt, version) for version in versions)
            _check_still_there(run, attempt, key)
            return after
    raise StoreUnavailable(f"the labels of {run.id_of(attempt)} are changed too often by other writers", "Try again")


def label_versions(run: Run) -> dict[Attempt, list[int]]:
    """The stored versions of labels in ascending order, usually one per attempt. One listing."""
    found: dict[Attempt, list[int]] = {}
    for attempt, version, _ in run.listed(run.keys.labels):
        if version.isascii() and version.isdigit():
            found.setdefault(attempt, []).append(int(version))
    return {attempt: sorted(versions) for attempt, versions in found.items()}


def newest_labels(run: Run, attempt: Attempt, version: int) -> Labels | None:
    """The labels of one checkpoint; None if they are deleted or damaged. version: the newest one in a listing."""
    for _ in range(_TRIES):
        try:
            return _read(run, attempt, version)
        except ObjectMissing:
            # Changed since the listing.
            versions = label_versions(run).get(attempt)
            if not versions:
                return None
            version = versions[-1]
        except Damaged as error:
            _LOG.warning("labels of %s are left out: %s", run.id_of(attempt), error)
            return None
    return None


def labelled(checkpoint: Checkpoint, labels: Labels | None) -> Checkpoint:
    """The checkpoint with its tags, and with metrics that were added or changed after the save. Pure."""
    if labels is None:
        return checkpoint
    return replace(checkpoint, tags=labels.tags, metrics={**checkpoint.metrics, **labels.metrics})


def with_labels(run: Run, checkpoints: list[Checkpoint]) -> list[Checkpoint]:
    """These checkpoints of a run with their labels: one listing, and one read per labelled checkpoint.

    Damaged labels are left out, with a warning.
    """
    there = label_versions(run)
    wanted = [checkpoint.attempt for checkpoint in checkpoints if checkpoint.attempt in there]
    found = in_parallel(lambda attempt: newest_labels(run, attempt, there[attempt][-1]), wanted)
    labels = dict(zip(wanted, found, strict=True))
    return [labelled(checkpoint, labels.get(checkpoint.attempt)) for checkpoint in checkpoints]


def find(run: Run, reference: Reference) -> Checkpoint:
    """The checkpoint of a reference, with its labels, even if it is corrupt. A tag or a metric needs all outcomes of
    the run. Raises NoCheckpoint."""
    if reference.name is not None:
        return catalog.named(with_labels(run, catalog.list_checkpoints(run)), reference, run.store.url)
    return with_labels(run, [catalog.find(run.store, reference)])[0]


def _apply(attempt: Attempt, before: Labels | None, change: LabelChange, by: str, now: float) -> Labels:
    tags = {**(before.tags if before else {}), **change.tags}
    metrics = {**(before.metrics if before else {}), **change.metrics}
    after = Labels(
        format=oldest_format(attempt),
        kind="labels",
        attempt=str(attempt),
        version=before.version + 1 if before else 1,
        tags={name: value for name, value in sorted(tags.items()) if value is not None},
        metrics={name: number for name, number in sorted(metrics.items()) if number is not None},
        by=by,
        at=now,
    )
    if max(len(after.tags), len(after.metrics)) > MAX_LABELS:
        raise InvalidRequest(f"a checkpoint has at most {MAX_LABELS} tags and {MAX_LABELS} metrics", "Remove some")
    return after


def _read(run: Run, attempt: Attempt, version: int) -> Labels:
    return run.read(run.keys.labels_version(attempt, version), Labels)


def _check_still_there(run: Run, attempt: Attempt, key: str) -> None:
    """Remove labels that were written after the checkpoint was swept: no sweep would find them."""
    if attempt not in decided_attempts(run):
        run.store.delete_many([key])
        raise NoCheckpoint(f"{run.id_of(attempt)} was deleted", "ckptctl ls lists the checkpoints")
    if attempt in hidden_attempts(run):
        raise NoCheckpoint(f"{run.id_of(attempt)} is being deleted", "ckptctl undelete restores it")


def _describe(change: LabelChange) -> str:
    return ", ".join(
        f"{name}-" if value is None else f"{name}={value}" for name, value in {**change.tags, **change.metrics}.items()
    )
