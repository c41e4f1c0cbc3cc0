"""show: the contents of one checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Annotated

from ckptapi.bodies import CheckpointBody
from ckptctl.commands.arguments import CheckpointArgument, LocalOption, an_option
from ckptctl.commands.listing import checkpoint_facts
from ckptctl.render import Block, Table
from ckptctl.session import Session
from ckptstore import human
from ckptstore.commits.catalog import Checkpoint
from ckptstore.commits.references import referenced_attempts
from ckptstore.errors import InvalidRequest
from ckptstore.format.documents import Content, Shard
from ckptstore.format.planning import derived_bytes, entry_bytes
from ckptstore.names import checkpoint_id
from ckptstore.reading.assets import asset_files
from ckptstore.reading.source import read_manifest
from ckptstore.values import Record


class ShownEntry(Record):
    """One entry as JSON. `aliases`: further names of the same bytes (tied weights)."""

    name: str
    dtype: str
    shape: list[int]
    bytes: int
    derived_bytes: int
    """Bytes that are not stored, because they are casts of another entry."""
    aliases: list[str]


class ShownShard(Record):
    """One shard as JSON."""

    name: str
    rank: int
    num_chunks: int
    raw_bytes: int
    stored_bytes: int
    """Bytes in its own file."""
    referenced_bytes: int
    """Bytes in files of earlier checkpoints."""
    codecs: list[str]
    to_mean: float
    """Its stored bytes over the mean of all shards."""


class ContentBody(Record):
    """One checkpoint and its contents, as JSON. `assets`: files that belong to the model. `references`: earlier
    checkpoints that hold some of its chunks."""

    checkpoint: CheckpointBody
    entries: list[ShownEntry]
    shards: list[ShownShard]
    items: list[str]
    assets: list[str]
    references: list[str]


def show(
    session: Session,
    checkpoint: CheckpointArgument,
    entries: Annotated[
        str | None, an_option("Only entries whose name matches, for example 'model/*'.", "PATTERN")
    ] = None,
    local: LocalOption = None,
) -> None:
    """Show one checkpoint: its facts, entries and shards.

    TO MEAN shows how evenly the ranks share the bytes: a save waits for the rank that writes the most.
    """
    session.add_local_tier(local)
    found = session.find_readable(checkpoint)
    content = read_manifest(session.source, found).content
    chosen = [entry for entry in _entries(content) if entries is None or _matches(entry, entries)]
    if entries is not None and not chosen:
        raise InvalidRequest(f"no entry of {found.id} matches {entries!r}", "Leave out --entries to show all")
    body = ContentBody(
        checkpoint=CheckpointBody.of(found),
        entries=chosen,
        shards=_shards(content.shards),
        items=sorted(content.trees),
        assets=list(asset_files(content)),
        references=[checkpoint_id(found.run, attempt) for attempt in referenced_attempts(content)],
    )
    session.screen.emit(body, [found.id], _blocks(found, body, session.clock()))


def _entries(content: Content) -> list[ShownEntry]:
    sizes, derived = entry_bytes(content), derived_bytes(content)
    aliases: dict[str, list[str]] = {}
    for alias, name in sorted(content.aliases.items()):
        aliases.setdefault(name, []).append(alias)
    return [
        ShownEntry(
            name=name,
            dtype=dtype,
            shape=shape,
            bytes=sizes[name],
            derived_bytes=derived.get(name, 0),
            aliases=aliases.get(name, []),
        )
        for name, dtype, shape in content.entries.rows()
    ]


def _matches(entry: ShownEntry, pattern: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in (entry.name, *entry.aliases))


def _shards(shards: Sequence[Shard]) -> list[ShownShard]:
    mean = sum(shard.stored_bytes for shard in shards) / max(1, len(shards))
    return [
        ShownShard(
            name=shard.name,
            rank=shard.rank,
            num_chunks=len(shard.chunks.raw),
            raw_bytes=int(shard.chunks.raw.sum()),
            stored_bytes=shard.stored_bytes,
            referenced_bytes=shard.referenced_bytes,
            codecs=sorted(shard.chunks.codecs),
            to_mean=round(shard.stored_bytes / mean, 3) if mean else 1.0,
        )
        for shard in sorted(shards, key=lambda shard: (shard.rank, shard.name))
    ]


def _blocks(found: Checkpoint, body: ContentBody, now: float) -> Iterator[Block]:
    facts = checkpoint_facts(found, now)
    if derived := sum(entry.derived_bytes for entry in body.entries):
        facts["derived"] = f"{human.size(derived)} are not stored but casts of other entries"
    for name, found_names in (("assets", body.assets), ("references", body.references)):
        if found_names:
            facts[name] = ", ".join(found_names)
    yield facts
    if body.entries:
        yield ""
        entries = [
            (e.name, e.dtype, " × ".join(map(str, e.shape)) or "scalar", human.size(e.bytes), ", ".join(e.aliases))
            for e in body.entries
        ]
        yield Table(("ENTRY", "DTYPE", "SHAPE", ">SIZE", "ALSO NAMED?"), entries)
    if body.shards:
        yield ""
        shards = [
            (
                s.name,
                str(s.rank),
                f"{s.num_chunks:,}",
                human.size(s.raw_bytes),
                human.size(s.stored_bytes),
                f"{s.to_mean:.2f}",
                ", ".join(s.codecs),
                human.size(s.referenced_bytes) if s.referenced_bytes else "",
            )
            for s in body.shards
        ]
        columns = ("SHARD", ">RANK", ">CHUNKS", ">SIZE", ">STORED", ">TO MEAN", "CODECS", ">REFERENCED?")
        yield Table(columns, shards)
