"""Importing: reads a foreign file and stores its state as one committed checkpoint, chunk by chunk.

Torch is loaded for its own formats only.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from contextlib import closing
from enum import StrEnum
from pathlib import Path

import msgspec

from ckpt.foreign.exporting import missing_torch
from ckpt.foreign.orbax_folder import METADATA, read_orbax
from ckpt.foreign.parts import ForeignSlice, ForeignState, file_read
from ckpt.saver.encode import encode_stream
from ckpt.saver.pipeline import upload_shard
from ckptstore import names
from ckptstore.clock import Clock
from ckptstore.codecs.chunk_codecs import fast
from ckptstore.commits.catalog import Checkpoint, find, from_outcome, joined_generation
from ckptstore.commits.commit import commit_attempt, write_receipt
from ckptstore.errors import CorruptObject, InvalidRequest, NoCheckpoint
from ckptstore.format.boxes import check_cover
from ckptstore.format.decoding import decode_json
from ckptstore.format.documents import Content, Shard
from ckptstore.format.shards import (
    ChunkSpan,
    EncodedChunk,
    Placed,
    Slice,
    chunk_table,
    encode_chunk,
    place_slices,
    plan_chunks,
    raw_bytes,
    slice_tables,
)
from ckptstore.format.trees import TAG
from ckptstore.names import Attempt, Reference, new_ulid
from ckptstore.reading.fetch import Progress
from ckptstore.reading.safetensors import read_header
from ckptstore.reading.weights import INDEX, ONLY
from ckptstore.run import Run
from ckptstore.stores import Store
from ckptstore.values import Value


def new_attempt(store: Store, reference: str, clock: Clock) -> tuple[Run, Attempt]:
    """The run and a new attempt of the step in RUN@STEP, in the newest generation that has begun.

    Raises InvalidRequest if the step has a checkpoint, or if this one would be the newest although a later step exists.
    """
    wanted = Reference.parse(reference)
    if wanted.step is None or wanted.ulid is not None:
        raise InvalidRequest(f"{reference!r} does not name a new checkpoint", "Use RUN@STEP")
    try:
        found = find(store, wanted)
    except NoCheckpoint:
        run = Run(store, wanted.run, clock)
        generation = joined_generation(run, wanted.step)
        return run, Attempt(wanted.step, new_ulid(clock()), generation=generation)
    raise InvalidRequest(
        f"{found.id} exists", "Choose another run or step; committed checkpoints are never overwritten"
    )


def write_checkpoint(run: Run, attempt: Attempt, foreign: ForeignState, progress: Progress) -> Checkpoint:
    """Store the state as the checkpoint of a single process; it exists on return.

    Memory does not grow with the state. Raises CorruptObject if the file is damaged; then nothing is committed.
    Raises Unavailable if the store fails.
    """
    created_at = run.clock()
    placed = place_slices(part.slice for part in foreign.parts)
    entries, slices = slice_tables(placed)
    content = Content(shards=[], entries=entries, slices=slices, aliases=foreign.aliases, trees=foreign.trees)
    check_cover(content)
    if placed:
        content.shards.append(_upload(run, attempt, placed, foreign, progress))
    checkpoint = from_outcome(commit_attempt(run, [write_receipt(run, attempt, content, created_at)]))
    assert checkpoint is not None  # an aborted attempt is an error of commit_attempt
    return checkpoint


def _upload(run: Run, attempt: Attempt, placed: Sequence[Placed], foreign: ForeignState, progress: Progress) -> Shard:
    """Write the shard, with only a few chunks in memory; durable on return."""
    reads = {(part.slice.entry, part.slice.box): part.read for part in foreign.parts}
    starts = [place.at for place in placed]
    done = 0

    def encode(_: memoryview, span: ChunkSpan) -> EncodedChunk:
        raw = memoryview(bytearray(span.bytes))  # read here, in several threads
        for place in placed[bisect_right(starts, span.at) - 1 :]:
            low, high = max(span.at, place.at), min(span.at + span.bytes, place.at + place.slice.bytes)
            if place.at >= span.at + span.bytes:
                break
            if low < high:
                read = reads[place.slice.entry, place.slice.box]
                read(low - place.at, raw[low - span.at : high - span.at])
        return encode_chunk(raw, fast(span.dtype))

    def report(total: int) -> None:
        nonlocal done
        progress(total - done)
        done = total

    name, spans = names.shard_name(0), ((memoryview(b""), span) for span in plan_chunks(placed))
    with closing(encode_stream(spans, encode)) as encoded:
        uploaded = upload_shard(run.store, run.keys.shard(attempt, name), raw_bytes(placed), encoded, report)
    return Shard(name=name, rank=0, chunks=chunk_table(uploaded.chunks))


class ForeignFormat(StrEnum):
    """Import formats."""

    SAFETENSORS = "safetensors"
    TORCH = "torch"
    DCP = "dcp"
    DEEPSPEED = "deepspeed"
    ACCELERATE = "accelerate"
    ORBAX = "orbax"


_SUFFIXES = {
    **dict.fromkeys((".safetensors", ".json"), ForeignFormat.SAFETENSORS),
    **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), ForeignFormat.TORCH),
}


class _Index(Value):
    weight_map: dict[str, str]


_FOLDERS = {
    ForeignFormat.DCP: (".metadata",),
    ForeignFormat.ORBAX: (METADATA, f"*/{METADATA}"),
    ForeignFormat.DEEPSPEED: ("latest", "*_model_states.pt"),
    ForeignFormat.ACCELERATE: ("optimizer.bin", "optimizer.pt"),
}
"""Files by which each folder is recognized."""


def choose_format(path: Path, given: ForeignFormat | None) -> ForeignFormat:
    """The requested format, or the one detected from the path. Raises InvalidRequest."""
    if not path.exists():
        raise InvalidRequest(f"{path} does not exist", "Pass a file or folder on this machine")
    if given is not None:
        return given
    for kind, patterns in _FOLDERS.items():
        if any(next(path.glob(pattern), None) for pattern in patterns):
            return kind
    found = _SUFFIXES.get(_file(path).suffix) if _file(path).is_file() else None
    if found is None:
        raise InvalidRequest(f"the format of {path} is unknown", "Pass --format")
    return found


def read_foreign(path: Path, kind: ForeignFormat, item: str) -> ForeignState:
    """The state at `path`, without the bytes of its tensors. `item` names a state that is not a dict of items.

    Raises InvalidRequest, UnsupportedObject or CorruptObject.
    """
    try:
        if kind is ForeignFormat.SAFETENSORS:
            return read_safetensors(_file(path), item)
        if kind is ForeignFormat.ORBAX:
            return read_orbax(path, item)
        try:
            from ckpt.foreign.dcp_folder import read_dcp
            from ckpt.foreign.state import read_torch
            from ckpt.foreign.trainer_folder import read_accelerate, read_deepspeed
        except ModuleNotFoundError as error:
            raise missing_torch(error) from error
        readers = {
            ForeignFormat.DCP: read_dcp,
            ForeignFormat.DEEPSPEED: read_deepspeed,
            ForeignFormat.ACCELERATE: read_accelerate,
        }
        foreign = readers.get(kind, read_torch)(path, item)
        if kind is ForeignFormat.ACCELERATE and _file(path).is_file():
            foreign.add(read_safetensors(_file(path), item))
        return foreign
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error}", "Check its permissions") from error


def _file(path: Path) -> Path:
    """The file of a folder to read first."""
    if not path.is_dir():
        return path
    return path / INDEX if (path / INDEX).is_file() else path / ONLY


def read_safetensors(path: Path, item: str) -> ForeignState:
    """Read a file, or the files of an index. A file that ckptctl exported is split into its items again."""
    index = _index(path)
    files = [path.parent / name for name in sorted(set(index.values()))] if index else [path]
    foreign = ForeignState()
    paths: dict[tuple[str, ...], str] = {}
    found: set[str] = set()
    for file in files:
        tensors, metadata = read_header(file)
        is_own = "checkpoint" in metadata  # as exports of ckptctl name theirs
        prefix = "" if is_own else f"{item}/"
        entries = {tensor.name: prefix + tensor.name for tensor in tensors}
        if twice := found & entries.keys():
            raise CorruptObject(f"tensor {min(twice)!r} is in two files of {path}")
        found |= entries.keys()
        for tensor in tensors:
            piece = Slice.whole(entries[tensor.name], tensor.dtype, tensor.shape)
            foreign.parts.append(ForeignSlice(piece, file_read(file, tensor.at)))
        tied = {alias: entries[name] for alias, name in metadata.items() if name in entries and alias not in entries}
        foreign.aliases.update({prefix + alias: entry for alias, entry in tied.items()})
        for name, entry in {**entries, **tied}.items():
            paths[tuple(name.split("/")) if is_own else (item, name)] = entry
    if not index.keys() <= found:
        raise CorruptObject(f"tensor {min(index.keys() - found)!r} is in {path} but not in its files")
    if not found:
        raise InvalidRequest(f"{path} holds no tensors", "Check that it is the right file")
    for keys, name in paths.items():
        foreign.place(keys, {TAG: "tensor", "name": name}, path)
    return foreign


def _index(path: Path) -> dict[str, str]:
    """The file of each tensor; empty for a single file. Raises CorruptObject."""
    if path.suffix != ".json":
        return {}
    try:
        files = decode_json(path.read_bytes(), _Index).weight_map
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptObject(f"{path} is not an index: {error}") from error
    for name in files.values():
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CorruptObject(f"{path} names {name!r}, which is not a .safetensors file in its folder")
        if not (path.parent / name).is_file():
            raise CorruptObject(f"{path.parent / name} is missing", "Copy all files of the index")
    return files
