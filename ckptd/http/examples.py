"""One example of each important body, for the OpenAPI document."""

from __future__ import annotations

import msgspec

from ckptapi import bodies
from ckptstore.commits.catalog import State

_ULID = "01KAJ2Y0Q8V6T0E9Q5M1Z3X7WN"
_ID = f"gpt@1000.{_ULID}"

_CHECKPOINT = bodies.CheckpointBody(
    id=_ID,
    run="gpt",
    step=1000,
    attempt=f"000000001000-{_ULID}",
    state=State.COMMITTED,
    committed_at=1763712002.5,
    created_at=1763712000.0,
    save_seconds=2.5,
    world_size=8,
    raw_bytes=1_490_944_000,
    stored_bytes=1_240_000_000,
    num_entries=444,
    num_shards=1,
    manifest_digest="5c8f8a4d1e3b2a7f9e0d6c5b4a39281f",
    manifest_bytes=18_204,
    metrics={"val_loss": 2.31},
)

EXAMPLES: tuple[msgspec.Struct, ...] = (
    _CHECKPOINT,
    bodies.Page([_CHECKPOINT], None),
    bodies.RunBody(run="gpt", num_checkpoints=12, stored_bytes=14_880_000_000, latest=_CHECKPOINT),
    bodies.NotifyRequest("gpt", f"000000001000-{_ULID}"),
    bodies.PruneRequest(keep_last=5, run="gpt"),
    bodies.LeaseRequest(id=_ID, holder="eval on node7", ttl_s=600),
    bodies.LeaseBody(run="gpt", lease=_ULID),
    bodies.RestoreRequest(run="gpt", key="job-17.restart-2", world_size=8, rank=0),
    bodies.RankReport(phase=bodies.Phase.FETCHING, done_bytes=400_000_000, total_bytes=1_240_000_000),
    bodies.EventBody(
        id=1763712002512,
        at=1763712002.512,
        kind="committed",
        run="gpt",
        checkpoint=_ID,
        detail={"step": 1000, "stored_bytes": 1_240_000_000, "metrics": {"val_loss": 2.31}},
    ),
    bodies.JobBody(
        id=_ULID,
        kind="verify",
        request={"run": "gpt", "checkpoint": None},
        state=bodies.JobState.RUNNING,
        created_at=1763712000.0,
        started_at=1763712000.1,
        done=620_000_000,
        total=1_240_000_000,
        unit="bytes",
    ),
    bodies.Problem(
        type="about:blank",
        title="Not Found",
        status=404,
        detail="run 'gpt' has no checkpoint in s3://bucket/ckpt",
        code="no_checkpoint",
        hint="ckptctl ls, or GET /v1/checkpoints, shows what there is",
        request_id="8e1f0c6d5b7a4c8f9d3e2b1a0f9e8d7c",
    ),
)
