"""Take a snapshot: acquire a slot, copy the state into it, and submit the job that makes it durable."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ckpt.config import OnBusy
from ckpt.snapshot.client import SaveClient
from ckpt.snapshot.handle import HandleUpdates
from ckpt.snapshot.live import LiveState
from ckpt.snapshot.request import SaveRequest, Snapshot
from ckptstore.clock import system_clock

if TYPE_CHECKING:
    from ckpt.snapshot.overlap import Overlap


def take_snapshot(
    client: SaveClient, request: SaveRequest, updates: HandleUpdates, overlap: Overlap | None, on_busy: OnBusy
) -> bool:
    """Copy the state and make it durable in the background. False if the save is skipped instead.

    On return the state is copied; with overlap, state that changes only in `optim.step()` may be copied after return.
    Where the host has no memory for a copy, the state itself is durable on return. An error means that nothing was
    saved, and the slot is released.
    """
    slot, started = None, time.perf_counter()
    if request.captured.leaves:
        try:
            slot = client.acquire(request.layout.num_bytes, on_busy, request.attempt.step)
        except OSError as error:
            snapshot = Snapshot(client.next_number(), request, None, system_clock(), updates)
            client.save_live(snapshot, LiveState(request.captured.leaves, request.layout), error)
            return True
        if slot is None:
            client.skip(request.attempt, updates)
            return False
    updates.measure(wait_s=time.perf_counter() - started)
    snapshot = Snapshot(client.next_number(), request, slot, system_clock(), updates)
    if slot is None:
        client.submit(snapshot)
    else:
        try:
            _copy_snapshot(client, snapshot, overlap)
        except BaseException:
            client.release(slot)
            raise
    return True


def _copy_snapshot(client: SaveClient, snapshot: Snapshot, overlap: Overlap | None) -> None:
    """Copy the leaves into the slot and submit the job once all are copied: now, or in the background."""
    assert snapshot.slot is not None
    captured, layout, stager = snapshot.request.captured, snapshot.request.layout, snapshot.slot.stager
    started = time.perf_counter()
    if overlap is not None and overlap.on:
        sameness, watch = overlap.sameness(captured), overlap.watch(layout)
        transfer = stager.begin(captured.leaves, layout, overlap.parts, sameness, watch)
        overlap.began(transfer, layout)
        if transfer.under_way:
            from ckpt.snapshot.overlap import PendingCopy  # loads torch

            guard = overlap.guard(transfer.later, transfer.samples, transfer.storages)
            overlap.begin(client, PendingCopy(transfer, guard, snapshot))
            return
        transfer.finish()
    else:
        stager.stage(captured.leaves, layout, captured.sameness)
    snapshot.updates.measure(stage_s=time.perf_counter() - started)
    client.submit(snapshot)
