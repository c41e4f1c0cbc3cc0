"""Take a snapshot: a slot for it, a copy in the slot, and the job that makes it durable."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from ckpt.capture.leaves import Captured
from ckpt.config import OnBusy
from ckpt.saver.messages import SaveJob
from ckpt.snapshot.client import PendingJob, SaveClient
from ckpt.snapshot.handle import SaveHandle
from ckpt.snapshot.overlap import Overlap, copy_snapshot
from ckpt.snapshot.stage import SnapshotLayout
from ckpt.snapshot.streamed import stream_snapshot
from ckptstore.clock import system_clock
from ckptstore.names import Attempt


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """What one save is about."""

    attempt: Attempt
    captured: Captured
    layout: SnapshotLayout
    metrics: Mapping[str, float]
    lease: str | None
    """A lease that its commit makes needless."""


def take_snapshot(
    client: SaveClient, request: SaveRequest, handle: SaveHandle, overlap: Overlap | None, on_busy: OnBusy
) -> bool:
    """Copy the state, now or beside training, and have it made durable. False if the save is skipped instead."""
    layout, slot = request.layout, None
    waiting = time.perf_counter()
    if request.captured.leaves:
        slot = client.acquire(layout.num_bytes, on_busy, request.attempt.step)
        if slot is None:
            client.skip(request.attempt, handle)
            return False
    handle._measure(wait_s=time.perf_counter() - waiting)
    streamed = slot is not None and slot.segment.num_bytes < layout.num_bytes
    number = client.next_number()
    complete = partial(_job, number, slot.number if slot is not None else None, system_clock(), request, streamed)
    if slot is None:
        client.submit(complete(), handle)
    elif streamed:
        stream_snapshot(client, slot, request.captured.leaves, layout, complete(), handle, overlap)
    else:
        try:
            copy_snapshot(
                client, slot, request.captured, layout, PendingJob(number, request.attempt, complete), handle, overlap
            )
        except BaseException:
            client.release(slot)
            raise
    return True


def _job(number: int, slot: int | None, created_at: float, request: SaveRequest, streamed: bool) -> SaveJob:
    return SaveJob(
        number=number,
        slot=slot,
        attempt=request.attempt,
        created_at=created_at,
        slices=request.layout.rows,
        aliases=request.captured.aliases,
        trees=request.captured.trees,
        local=request.captured.write(),
        metrics=dict(request.metrics),
        lease=request.lease,
        streamed=streamed,
    )
