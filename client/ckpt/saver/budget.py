"""The host memory of a save, divided among its stages."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt.saver.encode import BUDGET_BYTES
from ckpt.saver.streaming import LEAST_BYTES


@dataclass(frozen=True, slots=True)
class Budget:
    """The bytes that each stage may hold."""

    slot: int | None
    """The size of a slot; None: the size of the snapshot."""
    encoded: int
    """Raw bytes of chunks that are being encoded, or encoded and not yet written. One chunk is always allowed."""
    upload: int
    """Bytes of parts of an object that are being filled or uploaded. One part is always allowed."""

    @staticmethod
    def of(staging_bytes: int | None, upload_bytes: int) -> Budget:
        """staging_bytes: limit on all stages together; None: no limit. upload_bytes: what a writer of the store holds
        by default."""
        if staging_bytes is None:
            return Budget(None, BUDGET_BYTES, upload_bytes)
        upload, encoded = min(upload_bytes, staging_bytes // 4), min(BUDGET_BYTES, staging_bytes // 8)
        return Budget(max(LEAST_BYTES, staging_bytes - upload - encoded), encoded, upload)
