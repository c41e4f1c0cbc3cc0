"""The one meeting of all ranks before the first save: one session, and who writes what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import xxhash

from ckpt.capture.ownership import Ownership, Unit, agree
from ckpt.distributed import World
from ckptstore.clock import system_clock
from ckptstore.errors import CkptError, error_from_code
from ckptstore.names import new_ulid


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks of a job know alike."""

    session: str
    """A ULID, from which the attempts of all saves are derived."""
    ownership: Ownership
    different_buffers: tuple[str, ...]
    """Buffers that are not equal on all ranks; those of the first holder are kept."""


def meet(world: World, describe: Callable[[], dict[str, Unit]], spread: bool) -> Agreement:
    """Say what this rank holds, hear what the others hold, and conclude. A collective of all ranks.

    Each list of units goes to the others once, however many ranks hold alike. Raises the first rank's error from
    `describe`, on every rank; UnsupportedObject; RankLost.
    """
    try:
        units = describe()
    except CkptError as error:
        world.gather([error.code, error.message, error.hint])
        raise
    packed = msgspec.msgpack.encode({name: msgspec.structs.replace(u, boxes=()) for name, u in units.items()})
    said = world.gather([new_ulid(system_clock()), xxhash.xxh3_128_digest(packed)])
    for rank, answer in enumerate(said):
        if len(answer) == 3:
            code, message, hint = answer
            raise error_from_code(code, f"rank {rank}: {message}", hint)
    first: dict[bytes, int] = {}
    for rank, (_, digest) in enumerate(said):
        first.setdefault(digest, rank)
    lists = world.gather(packed if first[said[world.rank][1]] == world.rank else None)
    decoded = {digest: msgspec.msgpack.decode(lists[rank], type=dict[str, Unit]) for digest, rank in first.items()}
    held = [units if rank == world.rank else decoded[digest] for rank, (_, digest) in enumerate(said)]
    ownership, different = agree(world.rank, held, spread)
    return Agreement(said[0][0], ownership, tuple(different))
