"""shards: the bytes that each rank wrote for a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import typer

from ckptctl.commands.arguments import CheckpointArgument
from ckptctl.commands.show import find_readable
from ckptctl.render import Row, Table, TableColumn
from ckptctl.session import Session
from ckptstore import human
from ckptstore.format.documents import Shard
from ckptstore.reading.source import read_manifest


class ShardShareBody(msgspec.Struct, frozen=True, kw_only=True):
    """One shard as JSON. `to_mean`: its stored bytes over the mean of all shards."""

    name: str
    rank: int
    num_chunks: int
    raw_bytes: int
    stored_bytes: int
    to_mean: float


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command("shards")(show_shards)


def show_shards(ctx: typer.Context, checkpoint: CheckpointArgument) -> None:
    """Show the shards of one checkpoint by rank, and how evenly the bytes are distributed.

    A save waits for the rank that writes the most.
    """
    session: Session = ctx.obj
    found = find_readable(session.source, checkpoint)
    shares = shard_shares(read_manifest(session.source, found).content.shards)
    if not shares:
        session.screen.note(f"{found.id} has no tensors")
    session.screen.emit(shares, [share.name for share in shares], [_table(shares)] if shares else [])


def shard_shares(shards: Sequence[Shard]) -> list[ShardShareBody]:
    """The share of each shard, by rank. Pure."""
    stored = [shard.stored_bytes for shard in shards]
    mean = sum(stored) / max(1, len(stored))
    shares = [
        ShardShareBody(
            name=shard.name,
            rank=shard.rank,
            num_chunks=len(shard.chunks.raw),
            raw_bytes=int(shard.chunks.raw.sum()),
            stored_bytes=count,
            to_mean=round(count / mean, 3) if mean else 1.0,
        )
        for shard, count in zip(shards, stored, strict=True)
    ]
    return sorted(shares, key=lambda share: (share.rank, share.name))


def _table(shares: Sequence[ShardShareBody]) -> Table:
    columns = (
        TableColumn("SHARD"),
        TableColumn("RANK", right=True),
        TableColumn("CHUNKS", right=True),
        TableColumn("SIZE", right=True),
        TableColumn("STORED", right=True),
        TableColumn("TO MEAN", right=True),
    )
    return Table(columns, [Row(_cells(share)) for share in shares])


def _cells(share: ShardShareBody) -> tuple[str, ...]:
    sizes = human.size(share.raw_bytes), human.size(share.stored_bytes)
    return share.name, str(share.rank), f"{share.num_chunks:,}", *sizes, f"{share.to_mean:.2f}"
