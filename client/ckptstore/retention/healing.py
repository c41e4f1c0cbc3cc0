"""Healing: objects with damaged bytes are written again, from other holders of the same bytes.

This is the only exception to the rule that committed objects are never overwritten. The new object has, bit for bit,
the bytes that the digests of its checkpoint name, so it is the object that was committed (docs/decisions/0026). An
object is replaced as a whole after every chunk of it was checked, or is left as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ckptstore.codecs.chunk_codecs import POLICIES, RAW, Buffer, decode, encode
from ckptstore.codecs.delta import DELTA
from ckptstore.commits import audit
from ckptstore.commits.catalog import Checkpoint, from_outcome, list_checkpoints
from ckptstore.commits.commit import read_outcome, read_receipts
from ckptstore.errors import CorruptObject, Damaged, ObjectMissing
from ckptstore.format.documents import DIGEST_BYTES, Content, Manifest, digest
from ckptstore.format.merging import merge
from ckptstore.format.parsing import pack_manifest
from ckptstore.format.planning import ChunkRead, ShardRead, plan_all
from ckptstore.format.records import Action
from ckptstore.format.statistics import side_documents
from ckptstore.names import Attempt
from ckptstore.reading.fetch import Progress, check_chunk, fetch_stored
from ckptstore.reading.source import StoreSource, check_manifest_data, read_manifest, stored_statistics
from ckptstore.reading.verify import Verification, verify
from ckptstore.run import Run
from ckptstore.stores import Store

_UNREADABLE = (Damaged, ObjectMissing)
_LEVELS = sorted({policy("float32").level for policy in POLICIES.values()})


class Healed(NamedTuple):
    """The objects that were written again, and those that could not be."""

    objects: tuple[str, ...]
    """Keys."""
    problems: tuple[str, ...]


def heal(run: Run, found: Verification, copies: Sequence[Store], throttle: Progress) -> Healed:
    """Write the damaged objects of a checkpoint again; durable on return. The caller holds a lease on the checkpoint.

    found: the result of its verification. copies: stores that may have the same objects, or further holders of chunks.
    throttle is called with the number of bytes read. Raises Unavailable; objects that were written by then stay.
    """
    healer = _Healer(run, copies, throttle)
    healer.heal_documents(found.checkpoint)
    if healer.objects:  # the chunks could not be planned before
        found = verify(StoreSource(run.store, run.clock), found.checkpoint, throttle=throttle)
    attempt = str(found.checkpoint.attempt)
    for holder, shard in dict.fromkeys((read.attempt or attempt, read.shard) for read in found.damaged):
        healer.heal_shard(Attempt.parse(holder), shard)
    return Healed(tuple(healer.objects), tuple(healer.problems))


class _Place(NamedTuple):
    """A place where the bytes of a chunk may be, encoded by any codec."""

    source: StoreSource
    checkpoint: Checkpoint
    chunk: ChunkRead


class _Healer:
    """Heals objects of one run. For one thread."""

    def __init__(self, run: Run, copies: Sequence[Store], throttle: Progress) -> None:
        self.objects: list[str] = []
        self.problems: list[str] = []
        self._run = run
        self._own = StoreSource(run.store, run.clock)
        self._copies = [StoreSource(copy, run.clock) for copy in (*copies, *run.store.elsewhere)]
        self._throttle = throttle

    def heal_documents(self, checkpoint: Checkpoint) -> None:
        """Write the manifest again, from the receipts or a copy, and receipts, from a copy."""
        run, attempt = self._run, checkpoint.attempt
        data = self._heal_document(run.keys.manifest(attempt), checkpoint.manifest_digest, self._merged(checkpoint))
        if data is None:
            return
        for receipt in check_manifest_data(checkpoint, data).receipts:
            self._heal_document(run.keys.receipt(attempt, receipt.rank), receipt.digest)

    def heal_shard(self, attempt: Attempt, shard: str) -> None:
        """Write a shard again, if every damaged chunk of it is found elsewhere; else record the problem."""
        try:
            outcome = read_outcome(self._run, attempt)
            checkpoint = from_outcome(outcome) if outcome is not None else None
            if checkpoint is None:
                raise CorruptObject(f"{self._run.id_of(attempt)} is not committed")
            self._write(checkpoint, shard)
        except _UNREADABLE as error:
            self.problems.append(f"cannot heal {shard} of {self._run.id_of(attempt)}: {error}")

    def _write(self, checkpoint: Checkpoint, shard: str) -> None:
        run, key = self._run, self._run.keys.shard(checkpoint.attempt, shard)
        manifest = read_manifest(self._own, checkpoint)
        content = manifest.content
        chunks = [chunk for chunk in plan_all(content) if (chunk.shard, chunk.attempt) == (shard, None)]
        own = {chunk.index: _Place(self._own, checkpoint, chunk) for chunk in chunks}
        places = self._find(checkpoint, content, [place.chunk for place in own.values() if self._read(place) is None])
        if not places:
            return  # another party has healed it
        # After a crash the log may contain a healing that was not carried out.
        audit.record(run, Action.HEAL, [checkpoint.attempt], f"{len(places)} of {len(chunks)} chunks of {shard}")
        with run.store.open_replacement(key, sum(chunk.stored for chunk in chunks)) as writer:
            for chunk in chunks:
                data = self._bytes_at(places.get(chunk.index, own[chunk.index]), chunk)
                if data is None:  # the block aborts the writer
                    raise CorruptObject(f"{chunk.name} changed while it was read")
                writer.write(data)
            writer.write(self._statistics(checkpoint, manifest, shard))
        self.objects.append(key)

    def _statistics(self, checkpoint: Checkpoint, manifest: Manifest, shard: str) -> bytes:
        """The statistics behind the chunks of a shard, if they are intact here or in a copy."""
        for of, side in zip(manifest.content.shards, side_documents(manifest), strict=True):
            if of.name == shard and side is not None and side.offset is not None:
                found = (stored_statistics(one, checkpoint, of.rank, side) for one in (self._own, *self._copies))
                return next(filter(None, found), b"")
        return b""

    def _find(self, damaged: Checkpoint, content: Content, chunks: Sequence[ChunkRead]) -> dict[int, _Place]:
        """A place with the bytes of each damaged chunk, by its index. Raises CorruptObject if there is none."""
        candidates = {name: list[_Place]() for _, names in _named(content, chunks) for name in names}
        for place, names in self._places(damaged.attempt, chunks) if chunks else ():
            for name in candidates.keys() & names:
                candidates[name].append(place)
        found = {}
        for chunk, names in _named(content, chunks):
            # Those with the same stored bytes first.
            others = (place for name in names for place in candidates[name])
            intact = (place for place in others if self._bytes_at(place, chunk) is not None)
            if (first := next(intact, None)) is None:
                raise CorruptObject(f"nothing else holds the bytes of {chunk.name}")
            found[chunk.index] = first
        return found

    def _places(self, damaged: Attempt, chunks: Sequence[ChunkRead]) -> Iterator[tuple[_Place, list[bytes]]]:
        """All other chunks of the run and its copies, each once, and the names of their bytes."""
        seen = {(id(self._own), str(damaged), chunk.shard, chunk.offset) for chunk in chunks}
        for source in (self._own, *self._copies):
            for checkpoint in list_checkpoints(Run(source.store, self._run.name, self._run.clock)):
                try:
                    content = read_manifest(source, checkpoint).content
                except _UNREADABLE:
                    continue
                for chunk, names in _named(content, plan_all(content)):
                    place = (id(source), chunk.attempt or str(checkpoint.attempt), chunk.shard, chunk.offset)
                    if place not in seen:
                        seen.add(place)
                        yield _Place(source, checkpoint, chunk), names

    def _bytes_at(self, place: _Place, wanted: ChunkRead) -> Buffer | None:
        """The stored bytes of the wanted chunk, if they, or the same bytes under another codec, are at the place."""
        chunk = place.chunk
        stored = self._read(place)
        if stored is None or chunk.digest == wanted.digest:
            return stored
        raw = memoryview(bytearray(chunk.raw))
        try:
            decode(chunk.codec, memoryview(stored), raw)
        except Damaged:
            return None
        encoded = (encode(wanted.codec, raw, level)[1] for level in _LEVELS)
        return next((data for data in encoded if digest(data) == wanted.digest), None)

    def _read(self, place: _Place) -> Buffer | None:
        """The stored bytes of a chunk; None if they are damaged."""
        source, checkpoint, chunk = place
        try:
            stored = fetch_stored(source, checkpoint, ShardRead((chunk,)))
            check_chunk(checkpoint, chunk, stored)
        except _UNREADABLE:
            return None
        self._throttle(chunk.stored)
        return stored

    def _heal_document(self, key: str, expected: str, others: Iterable[bytes] = ()) -> bytes | None:
        """The document with this digest, written again if need be; None if nothing else holds its bytes."""
        own = self._run.store.find(key)
        if own is not None and digest(own) == expected:
            return own
        for data in (*others, *(copy.store.find(key) for copy in self._copies)):
            if data is not None and digest(data) == expected:
                audit.record(self._run, Action.HEAL, [Attempt.parse(key.split("/")[-2])], key.rsplit("/", 1)[-1])
                self._run.store.put(key, data)
                self.objects.append(key)
                return data
        self.problems.append(f"nothing else holds the bytes of {key}")
        return None

    def _merged(self, checkpoint: Checkpoint) -> Iterator[bytes]:
        """The manifest, which follows from the receipts."""
        try:
            yield pack_manifest(merge(read_receipts(self._run, checkpoint.attempt, range(checkpoint.world_size))))
        except _UNREADABLE:
            return


def _named(content: Content, chunks: Iterable[ChunkRead]) -> Iterator[tuple[ChunkRead, list[bytes]]]:
    """Chunks with the digests of their bytes, stored, then raw, as far as known. Equal bytes share a digest. Pure."""
    tables = {shard.name: shard.chunks for shard in content.shards}
    for chunk in chunks:
        names = [bytes.fromhex(chunk.digest)]
        # The raw codec stores the raw bytes. A delta of other bases would be another one.
        if chunk.codec not in (RAW, DELTA):
            names.append(tables[chunk.shard].raw_digest_of(chunk.index))
        yield chunk, [name for name in names if name != bytes(DIGEST_BYTES)]
