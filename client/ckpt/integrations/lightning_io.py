"""Lightning's CheckpointIO: `ModelCheckpoint` and everything else that saves through a strategy, into a run.

    Trainer(plugins=[CkptdCheckpointIO("s3://bucket/ckpts", run="gpt")], callbacks=[ModelCheckpoint(...)])

Lightning hands over one dictionary on rank 0, and waits. Its tensors are entries of the checkpoint: `state_dict/NAME`
and `optimizer_states/0/state/...`. At the path that Lightning chose lies a small file that names the checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from torch.multiprocessing.reductions import StorageWeakRef

from ckpt.capture.train_state import TrainState
from ckpt.capture.values import check_others
from ckpt.checkpointer import Checkpointer
from ckpt.integrations.keeping import noted, noted_beside, write_note
from ckptstore.errors import CheckpointHeld, NoCheckpoint, UnsupportedObject
from ckptstore.names import Reference
from ckptstore.operator import StoreOperator
from ckptstore.stores import open_store

logger = logging.getLogger(__name__)

SCHEME = "ckptd://"
_HYPERPARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")


class CkptdCheckpointIO(TorchCheckpointIO):
    """Saves what Lightning hands over; for strategies that use a CheckpointIO (one process, DDP). For one thread.

    store, run, options: as for `ckpt.Checkpointer`, with group="solo". A save returns when the checkpoint is durable.
    Several saves of the same weights at one step share a checkpoint. Random state and positions of loaders are not in
    what Lightning hands over: use `ckpt.integrations.lightning.CkptdCheckpoint` for exact resumes.
    """

    def __init__(self, store: str | None = None, run: str | None = None, **options: Any) -> None:
        super().__init__()
        self._open = partial(Checkpointer, store, run=run, **{**options, "group": "solo"})
        self._checkpointer = self._open()
        self._resumed: Checkpointer | None = None
        """Restored what was loaded last: the next save continues from there, unless a teardown comes before it."""
        self._ids: dict[str, str] = {}
        """The checkpoints at the paths that were written here."""
        self._newest: _Saved | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Save, and write the file that names the checkpoint; both are durable on return. The checkpoint that
        the path named before is deleted, unless another path names it or it is held.

        Raises what `ckpt.save` raises, and TypeError for storage_options.
        """
        if storage_options is not None:
            raise TypeError("options of the store are an argument of CkptdCheckpointIO")
        path = str(path)
        before = self._ids.get(path) or noted(path)
        self._ids[path] = named = self._saved(checkpoint)
        write_note(path, named)
        if before is not None:
            self._delete(before, path)

    def _saved(self, checkpoint: dict[str, Any]) -> str:
        """The checkpoint that holds this: the newest one if it was saved from the same, or else a new one."""
        step, marks = int(checkpoint["global_step"]), _marks(checkpoint)
        newest, resumed = self._newest, self._resumed
        if newest is not None and (newest.step, newest.marks) == (step, marks):
            return newest.id
        if resumed is not None or (newest is not None and step < newest.step):  # another training
            self._checkpointer.close()
            self._checkpointer, self._resumed = resumed or self._open(), None
        others = drop_objects(dict(checkpoint))
        tensors: dict[str, Any]
        tensors = {name: others.pop(name) for name in ("state_dict", "optimizer_states") if name in others}
        saved = self._checkpointer.save(None, None, step, shared={**tensors, "trainer": others}, repeat_step=True)
        self._newest = _Saved(step, marks, saved.id)
        return saved.id

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """The dictionary, with its tensors on the CPU; that of a file of Lightning's own as before.

        path: also `ckptd://RUN@STEP`. Raises NoCheckpoint, and what `ckpt.restore` raises.
        """
        named = str(path).removeprefix(SCHEME) if str(path).startswith(SCHEME) else noted(str(path))
        if named is None:
            loaded: dict[str, Any] = super().load_checkpoint(path, map_location, weights_only)
            return loaded
        self._end_resumed()
        self._resumed = self._open()
        restored = self._resumed.restore(checkpoint=named, rng=False)
        if restored is None:
            raise NoCheckpoint(f"{named} does not exist", "ckptctl ls lists the checkpoints")
        others = restored.values.pop("trainer")
        return {**restored.values, **others}

    def remove_checkpoint(self, path: Any) -> None:
        """Delete the file, and the checkpoint unless another path names it or it is held or the newest of its run."""
        path = str(path)
        named = self._ids.pop(path, None) or noted(path)
        super().remove_checkpoint(path)
        if named is not None:
            self._delete(named, path)

    def _delete(self, named: str, path: str) -> None:
        """Delete a checkpoint that this path names no more."""
        if named in (*self._ids.values(), *noted_beside(path)):
            return
        config = self._checkpointer.config
        operator = StoreOperator(open_store(config.source, config.options))
        for checkpoint in operator.checkpoints(config.run_name):
            if checkpoint.id == str(Reference.parse(named)):
                try:
                    operator.delete(checkpoint, grace_s=0.0, reason="removed by Lightning")
                except (CheckpointHeld, NoCheckpoint) as error:
                    logger.info("%s stays: %s", named, error)

    def teardown(self) -> None:
        """Return when the saver has ended; a later save starts another one, and continues the run if its step is not
        lower than that of the newest save."""
        self._end_resumed()
        self._checkpointer.close()

    def _end_resumed(self) -> None:
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            resumed.close()


class _Saved(NamedTuple):
    """The newest save."""

    step: int
    marks: object
    """Equal for what has the same content; holds no tensor."""
    id: str


def _marks(checkpoint: Mapping[str, Any]) -> object:
    weights = checkpoint.get("state_dict", {})
    versions = [
        (name, StorageWeakRef(one.untyped_storage()), one._version)  # type: ignore[no-untyped-call]
        for name, one in weights.items()
        if isinstance(one, torch.Tensor)
    ]
    return frozenset(checkpoint), versions  # fewer items for a save of the weights alone


def drop_objects(state: dict[str, Any]) -> dict[str, Any]:
    """The same, without hyperparameters that are not plain data, such as modules: nothing that resumes needs them."""
    for key in _HYPERPARAMETERS:
        found = state.get(key)
        if isinstance(found, Mapping) and not _is_plain(key, found):
            state[key] = {name: value for name, value in found.items() if _is_plain(name, value)}
    return state


def _is_plain(name: str, value: Any) -> bool:
    try:
        check_others(TrainState.of(None, None, {}, {"value": [value]}))
    except UnsupportedObject:
        logger.debug("of the hyperparameters %s is not saved: it is a %s", name, type(value).__name__)
        return False
    return True
