"""Lightning's CheckpointIO: `ModelCheckpoint` and everything else that saves through a strategy, into a run.

    Trainer(plugins=[CkptdCheckpointIO("s3://bucket/ckpts", run="gpt")], callbacks=[ModelCheckpoint(...)])

Lightning hands over one dictionary on rank 0, and waits. Its tensors are entries of the checkpoint: `state_dict/NAME`
and `optimizer_states/0/state/...`. At the path that Lightning chose lies a small file that names the checkpoint.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import fsspec
from lightning.fabric.plugins.io import TorchCheckpointIO

from ckpt.capture.train_state import TrainState
from ckpt.capture.values import check_others
from ckpt.checkpointer import Checkpointer
from ckptstore.errors import CheckpointHeld, NewestCheckpoint, NoCheckpoint, UnsupportedObject
from ckptstore.names import Reference
from ckptstore.operator import StoreOperator
from ckptstore.stores import open_store

logger = logging.getLogger(__name__)

SCHEME = "ckptd://"
_NOTE_BYTES = 4096
_HYPERPARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")


class CkptdCheckpointIO(TorchCheckpointIO):
    """Saves what Lightning hands over; for strategies that use a CheckpointIO (one process, DDP). For one thread.

    store, run, options: as for `ckpt.Checkpointer`, with group="solo". A save returns when the checkpoint is durable.
    Several saves of one step share a checkpoint. Random state and positions of loaders are not in what Lightning hands
    over: use `ckpt.integrations.lightning.CkptdCheckpoint` for exact resumes.
    """

    def __init__(self, store: str | None = None, run: str | None = None, **options: Any) -> None:
        super().__init__()
        self._open = partial(Checkpointer, store, run=run, **{**options, "group": "solo"})
        self._checkpointer = self._open()
        self._ids: dict[str, str] = {}
        """The checkpoints at the paths that were written here."""
        self._newest: tuple[int, str] | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Save, and write the file that names the checkpoint; both are durable on return.

        Raises what `ckpt.save` raises, and TypeError for storage_options.
        """
        if storage_options is not None:
            raise TypeError("options of the store are an argument of CkptdCheckpointIO")
        step = int(checkpoint["global_step"])
        if self._newest is None or self._newest[0] != step:
            others = drop_objects(dict(checkpoint))
            tensors: dict[str, Any] = {
                name: others.pop(name) for name in ("state_dict", "optimizer_states") if name in others
            }
            saved = self._checkpointer.save(None, None, step, shared={**tensors, "trainer": others})
            self._newest = (step, saved.id)
        self._ids[str(path)] = self._newest[1]
        with fsspec.open(str(path), "w", auto_mkdir=True) as file:  # type: ignore[no-untyped-call]
            json.dump({"ckptd": self._newest[1]}, file)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """The dictionary, with its tensors on the CPU; that of a file of Lightning's own as before.

        path: also `ckptd://RUN@STEP`. Raises NoCheckpoint, and what `ckpt.restore` raises.
        """
        named = str(path).removeprefix(SCHEME) if str(path).startswith(SCHEME) else _noted(str(path))
        if named is None:
            loaded: dict[str, Any] = super().load_checkpoint(path, map_location, weights_only)
            return loaded
        checkpoint = None if named.endswith("@latest") else named
        restored = self._checkpointer.restore(checkpoint=checkpoint, rng=False)
        if restored is None:
            raise NoCheckpoint(f"{named} does not exist", "ckptctl ls lists the checkpoints")
        tensors = {name: value for name, value in restored.values.items() if name != "trainer"}
        return {**tensors, **restored.values["trainer"]}

    def remove_checkpoint(self, path: Any) -> None:
        """Delete the file, and the checkpoint unless another path names it or it is held or the newest of its run."""
        named = self._ids.pop(str(path), None) or _noted(str(path))
        super().remove_checkpoint(path)
        if named is None or named in self._ids.values():
            return
        config = self._checkpointer.config
        operator = StoreOperator(open_store(config.source, config.options))
        found = [one for one in operator.checkpoints(config.run_name) if one.id == str(Reference.parse(named))]
        for checkpoint in found:
            try:
                operator.delete(checkpoint, grace_s=0.0, reason="removed by Lightning")
            except (CheckpointHeld, NewestCheckpoint, NoCheckpoint) as error:
                logger.info("%s stays: %s", named, error)

    def teardown(self) -> None:
        """Return when the saver has ended; a later save starts another one."""
        self._checkpointer.close()
        self._checkpointer = self._open()


def _noted(path: str) -> str | None:
    """The checkpoint that the file at this path names; None for another file."""
    try:
        with fsspec.open(path, "rb") as file:  # type: ignore[no-untyped-call]
            head = file.read(_NOTE_BYTES)
        return str(json.loads(head)["ckptd"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def drop_objects(state: dict[str, Any]) -> dict[str, Any]:
    """The same, without hyperparameters that are not plain data, such as modules: nothing that resumes needs them."""
    for key in _HYPERPARAMETERS:
        if isinstance(found := state.get(key), Mapping):
            state[key] = {name: value for name, value in found.items() if _is_plain(name, value)}
    return state


def _is_plain(name: str, value: Any) -> bool:
    try:
        check_others(TrainState.of(None, None, {}, {"value": [value]}))
    except UnsupportedObject:
        logger.debug("the hyperparameter %s is not saved: it is a %s", name, type(value).__name__)
        return False
    return True
