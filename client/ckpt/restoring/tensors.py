"""Reading tensors or arrays without a model."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from ckpt.restoring.planning import make_destinations
from ckpt.restoring.resolve import noting_damage, release_lease, take_lease
from ckptstore.commits.catalog import Checkpoint
from ckptstore.format.planning import plan_reads
from ckptstore.reading.fetch import fetch
from ckptstore.reading.source import Source, read_manifest


def load_tensors(source: Source, checkpoint: Checkpoint, pattern: str) -> dict[str, Any]:
    """The entries whose name matches a shell pattern, on the CPU, by name; further names of an entry share it.

    Tensors of torch; arrays of numpy in a process that has loaded JAX and not torch, or where torch is not installed.
    """
    lease = take_lease(source, checkpoint)
    try:
        with noting_damage(source, checkpoint):
            content = read_manifest(source, checkpoint).content
            destinations = make_destinations(content)
            entry_of = {**{name: name for name in content.entries.name}, **content.aliases}
            wanted = {name: entry for name, entry in entry_of.items() if fnmatchcase(name, pattern)}
            tensors = {entry: destinations.load(entry) for entry in dict.fromkeys(wanted.values())}
            destinations.allocate()
            reads = plan_reads(content, destinations.wants())
            with destinations.receiving(reads) as buffers:
                fetch(source, checkpoint, reads, buffers)
            destinations.place()
            return {name: tensors[entry] for name, entry in wanted.items()}
    finally:
        if lease is not None:
            release_lease(source, checkpoint.run, lease)
