"""The handler of each kind of job."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from ckptapi.bodies import ChunkBody, CollectJob, HealJob, VerifyJob
from ckptd.services.jobs import JobHandler, JobProgress
from ckptd.services.store_sync import StoreSync
from ckptstore.clock import Clock
from ckptstore.commits.catalog import Checkpoint, State, list_checkpoints
from ckptstore.commits.labels import find
from ckptstore.errors import InvalidRequest
from ckptstore.fleet import Unit, open_engine, run_units, units_of
from ckptstore.names import Reference
from ckptstore.operator import StoreOperator
from ckptstore.reading.verify import Verification
from ckptstore.retention.deletion import CollectReport
from ckptstore.retention.scrubbing import confirm_damage, scrub, scrub_unit
from ckptstore.run import Run
from ckptstore.stores import Store

_MOST_LISTED = 100
"""Items of a list in a result."""


@dataclass
class JobHandlers:
    """Runs jobs on one store. Any thread may call any method."""

    _store: Store
    _store_sync: StoreSync
    _clock: Clock
    _orphan_grace_s: float
    _forget: Callable[[str], None]
    """Called with the key of an object that was written again, whose cached bytes are obsolete."""
    _jobs_on: str
    """The engine that reads and heals; empty: this process."""

    def by_kind(self) -> Mapping[type, JobHandler]:
        """The handlers by the type of their request."""
        return {
            VerifyJob: self.verify,
            HealJob: self.heal,
            CollectJob: self.collect,
        }

    def verify(self, request: VerifyJob, progress: JobProgress) -> dict[str, Any]:
        """Read checkpoints completely, from the store; damaged ones are marked corrupt."""
        if request.chunks is None:
            chosen = [c for c in self._chosen(request) if request.checkpoint or c.state is not State.CORRUPT]
            return self._scrub(chosen, progress, ranks=request.ranks)
        if request.checkpoint is None:
            raise InvalidRequest("chunks are given without a checkpoint", "Name the checkpoint")
        return self._confirm(self._chosen(request)[0], request.chunks, progress)

    def heal(self, request: HealJob, progress: JobProgress) -> dict[str, Any]:
        """As verify, and write damaged objects again from other checkpoints of the run."""
        return self._scrub(self._chosen(request), progress, heals=True)

    def _scrub(
        self,
        chosen: list[Checkpoint],
        progress: JobProgress,
        heals: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> dict[str, Any]:
        progress.expect(sum(c.needed_bytes for c in chosen), "bytes")
        corrupt: list[str] = []
        healed: list[str] = []
        estimates: dict[str, Any] = {}
        num_checked = 0
        for found in self._scrub_each(chosen, progress, heals, ranks):
            num_checked += 1
            for key in found.healed:
                self._forget(key)
                progress.log(f"healed {key}")
            healed += found.healed
            progress.log(f"{found.checkpoint.id} {'ok' if found.ok else '; '.join(found.problems[:5])}")
            if not found.ok:
                corrupt.append(found.checkpoint.id)
            if found.estimates and len(estimates) < _MOST_LISTED:
                estimates[found.checkpoint.id] = msgspec.to_builtins(found.estimates)
            self._store_sync.sync_run(found.checkpoint.run)
        result = {"checked": num_checked, "corrupt": corrupt[:_MOST_LISTED], "num_corrupt": len(corrupt)}
        if heals:
            result |= {"healed": healed[:_MOST_LISTED], "num_healed": len(healed)}
        return result if ranks is None else {**result, "estimates": estimates}

    def _scrub_each(
        self,
        chosen: list[Checkpoint],
        progress: JobProgress,
        heals: bool,
        ranks: Sequence[int] | None,
    ) -> Iterator[Verification]:
        if not self._jobs_on:
            healing = () if heals else None
            yield from scrub(
                self._store, chosen, progress.by, self._clock, progress.advance, heal_from=healing, ranks=ranks
            )
            return
        work = partial(scrub_unit, self._store.url, progress.by, heals, ranks)
        with open_engine(self._jobs_on) as (executor, _):
            units = units_of(Unit((c.id,), c.needed_bytes) for c in chosen)
            for unit, found in run_units(executor, work, units):
                if isinstance(found, Exception):
                    raise found
                progress.advance(unit.bytes)
                yield from found

    def _confirm(self, checkpoint: Checkpoint, chunks: list[ChunkBody], progress: JobProgress) -> dict[str, Any]:
        run = Run(self._store, checkpoint.run, self._clock, progress.by)
        found = confirm_damage(run, checkpoint, {(chunk.shard, chunk.index) for chunk in chunks}, progress.advance)
        corrupt = [checkpoint.id] if found is not None and not found.ok else []
        for problem in found.problems if found is not None else ():
            progress.log(f"{checkpoint.id} {problem}")
        self._store_sync.sync_run(checkpoint.run)
        return {"checked": int(found is not None), "corrupt": corrupt, "num_corrupt": len(corrupt)}

    def collect(self, request: CollectJob, progress: JobProgress) -> dict[str, Any]:
        """Collect orphans, interrupted deletions and expired leases."""
        operator = StoreOperator(self._store, self._clock, progress.by)
        runs = operator.collectable(request.run)
        progress.expect(len(runs), "runs")
        reports: list[CollectReport] = []
        for report in operator.collect_each(runs, self._orphan_grace_s):
            reports.append(report)
            if report.aborted or report.freed_bytes:
                progress.log(f"{report.run}: aborted {len(report.aborted)} attempts, freed {report.freed_bytes} bytes")
            progress.advance(1)
        return {"runs": msgspec.to_builtins(reports), "freed_bytes": sum(report.freed_bytes for report in reports)}

    def _chosen(self, request: VerifyJob | HealJob) -> list[Checkpoint]:
        """The checkpoints to read. The result includes corrupt ones."""
        if request.checkpoint is not None:
            reference = Reference.parse(request.checkpoint)
            return [find(Run(self._store, reference.run), reference)]
        operator = StoreOperator(self._store)
        runs = map(operator.run, operator.collectable(request.run))
        return [checkpoint for run in runs for checkpoint in list_checkpoints(run)]
