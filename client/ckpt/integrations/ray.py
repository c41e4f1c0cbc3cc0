"""Ray Train: the folder of a report holds only the name of the checkpoint; workers save and restore it themselves.

    from ckpt.integrations.ray import load, save

    with previous.as_directory() as folder:
        load(folder, model, optim, loader=loader)
    ...
    save(folder, model, optim, step, loader=loader)
    ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))

Ray copies the folder to its storage, and gives it back after a failure. It needs nothing else of Ray, which is not
imported: any tool that keeps a folder per checkpoint can use these functions.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt import default
from ckpt.checkpointer import Checkpointer
from ckpt.integrations.keeping import noted, write_note
from ckpt.restoring.pipeline import Restored
from ckptstore.commits.catalog import Checkpoint
from ckptstore.errors import NoCheckpoint

if TYPE_CHECKING:
    from ckpt.capture.train_state import Model, Optimizers

NOTE = "ckptd"
"""The file in the folder."""


def save(
    folder: str | PathLike[str],
    model: Model | None,
    optim: Optimizers | None,
    step: int,
    *,
    checkpointer: Checkpointer | None = None,
    **options: Any,
) -> Checkpoint:
    """Save, and write the name of the checkpoint into the folder; all ranks call it, each with a folder of its own.

    The checkpoint of all ranks is durable on return. checkpointer: by default that of `ckpt.init`. options: as for
    `ckpt.save`. Raises what that raises, and OSError.
    """
    saved = (checkpointer or default.current()).save(model, optim, step, **options)
    write_note(str(Path(folder) / NOTE), saved.id)
    return saved


def load(
    folder: str | PathLike[str],
    model: Model | None = None,
    optim: Optimizers | None = None,
    *,
    checkpointer: Checkpointer | None = None,
    **options: Any,
) -> Restored:
    """Restore the checkpoint that the folder names. A collective of all ranks.

    options: as for `ckpt.restore`. Raises NoCheckpoint if the folder names none, or it was deleted, and what
    `ckpt.restore` raises.
    """
    if (named := noted(str(Path(folder) / NOTE))) is None:
        raise NoCheckpoint(f"{folder} names no checkpoint", "Give the folder that `save` was given")
    restored = (checkpointer or default.current()).restore(model, optim, checkpoint=named, **options)
    assert restored is not None  # one that is named is restored, or raises
    return restored
