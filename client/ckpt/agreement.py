"""The one meeting of all ranks before the first save: one session, and who writes what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from ckpt.capture.ownership import Ownership, Unit, Units, agree
from ckpt.distributed import World
from ckptstore.clock import system_clock
from ckptstore.errors import CkptError, SaveFailed, error_from_code
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
    except Exception as error:  # whatever it is, the others wait to hear of it
        told = error if isinstance(error, CkptError) else SaveFailed(f"cannot describe its state: {error!r}")
        world.gather([told.code, told.message, told.hint])
        raise
    packed = msgspec.msgpack.encode({name: msgspec.structs.replace(u, boxes=()) for name, u in units.items()})
    said = world.gather([new_ulid(system_clock())])
    for rank, answer in enumerate(said):
        if len(answer) == 3:
            code, message, hint = answer
            raise error_from_code(code, f"rank {rank}: {message}", hint)
    held: list[Units] = [units] * world.size
    for data, ranks in world.gather_alike(packed).items():
        theirs = msgspec.msgpack.decode(data, type=dict[str, Unit])
        for rank in ranks:
            if rank != world.rank:
                held[rank] = theirs
    ownership, different = agree(world.rank, held, spread)
    return Agreement(said[0][0], ownership, tuple(different))
