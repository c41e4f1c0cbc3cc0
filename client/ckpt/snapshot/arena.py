"""The arena: slots of shared memory. Each holds one snapshot from staging until its shard is durable."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable
from typing import NamedTuple

from ckpt.capture.leaves import Leaves
from ckpt.device import DEVICES
from ckpt.host.memory import available_bytes, local_ranks, on_node
from ckpt.host.segment import Segment, populate
from ckpt.lazily import torch
from ckpt.saver.messages import Forget, Slot
from ckpt.snapshot.stage import Stager
from ckptstore import human
from ckptstore.threads import Latch, start_daemon

logger = logging.getLogger(__name__)

_NOT_MADE = "could not preallocate a snapshot buffer; the next save will retry: %s"


class ArenaSlot(NamedTuple):
    """One slot: memory, and its stager."""

    number: int
    segment: Segment
    stager: Stager


class Arena:
    """At most `num_slots` slots with all pages populated, reused by every save.

    They are allocated in the background once their size is known, or by the save that needs one. One thread at a time
    calls expect, acquire and close, never one that signals interrupt; the others may be called from any thread.
    """

    def __init__(self, num_slots: int, announce: Callable[[Slot | Forget, Segment | None], None]) -> None:
        """announce: called with a new slot and its memory, and with one that is gone."""
        self._num_slots = num_slots
        self._announce = announce
        self._changed = threading.Condition()
        self._slots: dict[int, ArenaSlot] = {}
        self._idle: dict[int, ArenaSlot] = {}
        """In the order of their release: the newest snapshot is overwritten last, which a restart may still need."""
        self.released = Latch()
        """Set when a slot is released after the last `acquire` found none."""
        self._making = 0
        self._numbers = 0
        self._wanted_bytes = 0
        self._gpu: torch.device | None = None
        self._background: threading.Thread | None = None
        self._prepared = False
        """Whether slots are allocated before training."""
        self._share = available_bytes()
        """Available memory per rank when the ranks of the host began to save: none had a slot yet."""

    @property
    def segments(self) -> dict[int, Segment]:
        """The memory of all slots, by number."""
        with self._changed:
            return {number: slot.segment for number, slot in self._slots.items()}

    def expect(self, num_bytes: int, gpu: torch.device | None, wait: bool) -> None:
        """Allocate all slots for snapshots of this size in the background, so that no save waits for it.

        gpu: one that snapshots are copied from; then the memory is pinned as well. wait: return once there is one slot,
        or its allocation has failed; with a gpu once there are all, because pinning beside training delays launches.
        """
        with self._changed:
            self._wanted_bytes = num_bytes
            self._gpu, self._prepared = gpu, wait
            self._drop_small()
        if not num_bytes:
            return
        if wait:
            try:
                slot = self.acquire(num_bytes)
            except OSError as error:
                logger.warning(_NOT_MADE, error)
                return
            self.release(slot)
        self.prepare_rest()
        if wait and gpu is not None:
            self.join()

    def warm_up(self, leaves: Leaves) -> None:
        """Copy leaves of GPUs into a slot, if one is idle, so that the first save waits for no kernel to be loaded."""
        with self._changed:
            slot = next(iter(self._idle.values()), None)
        if slot is not None:
            slot.stager.warm_up(leaves)

    def acquire(self, num_bytes: int) -> ArenaSlot | None:
        """An idle slot of at least `num_bytes`, now in use. None if all are in use; then wait for `released`.

        Waits for a slot that is being allocated. Allocates one if fewer than the maximum exist.
        """
        with self._changed:
            self._wanted_bytes = num_bytes
            while True:
                self._drop_small()
                if self._idle:
                    return self._idle.pop(next(iter(self._idle)))
                if self._misses_slots:
                    self._making += 1
                    break
                if not self._making:
                    self.released = Latch()
                    return None
                self._changed.wait()
        return self._make(num_bytes, idle=False)

    def prepare_rest(self) -> None:
        """Allocate the missing slots in the background, if memory allows."""
        with self._changed:
            making = self._background is not None and self._background.is_alive()
            if self._misses_slots and not making:
                self._background = start_daemon("ckpt-arena", self._make_rest)

    def release(self, slot: ArenaSlot | None) -> None:
        """Make a slot idle again; None: there is none."""
        if slot is None:
            return
        with self._changed:
            if slot.number in self._slots:
                self._idle[slot.number] = slot
                self._drop_small()
                self._changed.notify_all()
                self.released.set()

    def join(self, timeout_s: float | None = None) -> None:
        """Return when no slot is allocated in the background, at the latest after `timeout_s`."""
        if self._background is not None:
            self._background.join(timeout_s)

    def close(self) -> None:
        """Free all slots."""
        self.join()
        with self._changed:
            for slot in self._slots.values():
                slot.segment.close()
            self._slots.clear()
            self._idle.clear()

    @property
    def _misses_slots(self) -> bool:
        return len(self._slots) + self._making < self._num_slots

    def _make_rest(self) -> None:
        while True:
            with self._changed:
                num_bytes = self._wanted_bytes
                if not self._misses_slots:
                    return
                available = available_bytes()
                if self._slots and available is not None and available < 2 * num_bytes:
                    logger.warning(
                        "memory suffices for one snapshot only: each save waits until the previous one is uploaded"
                    )
                    self._num_slots = 1
                    return
                self._making += 1
            try:
                self._make(num_bytes, idle=True)
            except Exception as error:
                logger.warning(_NOT_MADE, error)
                return

    def _make(self, num_bytes: int, idle: bool) -> ArenaSlot:
        try:
            self._check_memory(num_bytes)
            segment = Segment(num_bytes)
            with self._changed:  # a GPU that snapshots are copied from, if one is known
                gpu = self._gpu or next((gpu for slot in self._slots.values() if (gpu := slot.stager.gpu)), None)
            with on_node(None if gpu is None else DEVICES[gpu.type](gpu).numa_node()):
                populate(segment)
            stager = Stager(segment)
            if gpu is not None:
                if idle and not self._prepared:
                    logger.info("pinning memory beside training delays launches; prepare() does it before")
                stager.pin(gpu, 0 if self._prepared else local_ranks())
        except BaseException:
            with self._changed:
                self._making -= 1
                self._changed.notify_all()
            raise
        with self._changed:
            self._making -= 1
            slot = ArenaSlot(self._numbers, segment, stager)
            self._numbers += 1
            self._slots[slot.number] = slot
            self._announce(Slot(slot.number, num_bytes), segment)
            if idle:
                self._idle[slot.number] = slot
            self._changed.notify_all()
        return slot

    def _check_memory(self, num_bytes: int) -> None:
        """Raises OSError where the kernel would kill this process for a slot of this size."""
        free, share = available_bytes(environ={}), available_bytes()
        if free is None or share is None or num_bytes <= min(free, max(share, self._share or 0)):
            return
        left = human.size(min(free, share))
        raise OSError(errno.ENOMEM, f"a snapshot takes {human.size(num_bytes)} of host memory, and {left} is available")

    def _drop_small(self) -> None:
        """Free idle slots that are too small for the state."""
        for number in list(self._idle):
            if self._slots[number].segment.num_bytes < self._wanted_bytes:
                del self._idle[number]
                self._slots.pop(number).segment.close()
                self._announce(Forget(number), None)
