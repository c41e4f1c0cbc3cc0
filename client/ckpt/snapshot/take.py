"""Take a snapshot: a slot for it, a copy in the slot, and the job that makes it durable."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from ckpt.capture.leaves import Captured
from ckpt.saver.messages import Job
from ckpt.snapshot.client import Draft, OnBusy, SaveClient
from ckpt.snapshot.handle import SaveHandle
from ckpt.snapshot.overlap import Overlap, copy_snapshot
from ckpt.snapshot.stage import Layout
from ckpt.snapshot.streamed import stream_snapshot
from ckptstore.clock import system_clock
from ckptstore.names import Attempt


@dataclass(frozen=True, slots=True)
class Save:
    """What one save is about."""

    attempt: Attempt
    captured: Captured
    layout: Layout
    metrics: Mapping[str, float]
    lease: str | None
    """A lease that its commit makes needless."""


def take_snapshot(client: SaveClient, save: Save, handle: SaveHandle, overlap: Overlap | None, on_busy: OnBusy) -> bool:
    """Copy the state, now or beside training, and have it made durable. False if the save is skipped instead."""
    layout, slot = save.layout, None
    waiting = time.perf_counter()
    if save.captured.leaves:
        slot = client.acquire(layout.num_bytes, on_busy, save.attempt.step)
        if slot is None:
            client.skip(save.attempt, handle)
            return False
    handle._measure(wait_s=time.perf_counter() - waiting)
    streamed = slot is not None and slot.segment.num_bytes < layout.num_bytes
    number = client.next_number()
    complete = partial(_job, number, slot.number if slot is not None else None, system_clock(), save, streamed)
    if slot is None:
        client.submit(complete(), handle)
    elif streamed:
        stream_snapshot(client, slot, save.captured.leaves, layout, complete(), handle, overlap)
    else:
        try:
            copy_snapshot(client, slot, save.captured, layout, Draft(number, save.attempt, complete), handle, overlap)
        except BaseException:
            client.release(slot)
            raise
    return True


def _job(number: int, slot: int | None, created_at: float, save: Save, streamed: bool) -> Job:
    return Job(
        number=number,
        slot=slot,
        attempt=save.attempt,
        created_at=created_at,
        slices=save.layout.rows,
        aliases=save.captured.aliases,
        trees=save.captured.trees,
        local=save.captured.write(),
        metrics=dict(save.metrics),
        lease=save.lease,
        streamed=streamed,
    )
