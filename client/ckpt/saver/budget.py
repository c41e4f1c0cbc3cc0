"""The host memory of a save, divided among its stages."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt.saver.encode import BUDGET_BYTES
from ckpt.saver.streaming import LEAST_BYTES


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes that each stage may hold."""

    slot: int | None
    """Of a slot; None: as much as the snapshot."""
    encoded: int
    """Raw bytes of chunks that are encoded, or being encoded, and not yet written; but one chunk always may be."""
    upload: int
    """Of parts of an object, being filled or on their way; but one part always may be."""

    @staticmethod
    def of(staging_bytes: int | None, upload_bytes: int) -> Budget:
        """staging_bytes: of all stages together; None: no limit. upload_bytes: what a writer of the store holds if
        nobody tells it to hold less."""
        if staging_bytes is None:
            return Budget(None, BUDGET_BYTES, upload_bytes)
        upload, encoded = min(upload_bytes, staging_bytes // 4), min(BUDGET_BYTES, staging_bytes // 8)
        return Budget(max(LEAST_BYTES, staging_bytes - upload - encoded), encoded, upload)
