"""The common parts of integrations: the retention that users of a framework ask for, the files that belong to their
model, and files that name a checkpoint.

A policy is applied to a trainer's run whenever a save has become durable; a run that a daemon looks after needs none.
Files that name a checkpoint lie at paths where a framework expects the checkpoint itself.
"""

from __future__ import annotations

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import copy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import fsspec

from ckpt.checkpointer import Checkpointer
from ckpt.config import Config
from ckpt.snapshot.handle import SaveHandle
from ckptstore.errors import CkptError, SaveSkipped
from ckptstore.format.records import Policy
from ckptstore.operator import StoreOperator
from ckptstore.reading.assets import NAMES
from ckptstore.reading.weights import module_name
from ckptstore.retention.pruning import Prune
from ckptstore.stores import open_store

logger = logging.getLogger(__name__)


class Keeper:
    """Deletes what a policy does not keep of one run, in a thread of its own; for the training thread of rank 0.

    A prune that fails is logged, and the next one does its work. It never deletes the newest checkpoint or a held one,
    and at most nine tenths of a run at once: a limit that is set on a long run takes effect within a few saves.
    """

    def __init__(self, config: Config, policy: Policy | None) -> None:
        """policy: None deletes nothing."""
        self._prune = Prune(policy, config.run_name, grace_s=0.0)
        self._operator = StoreOperator(open_store(config.source, config.options)) if policy is not None else None
        self._thread = ThreadPoolExecutor(1, "ckpt-keeper")
        self._warned = False

    def saved(self, handle: SaveHandle) -> None:
        """Prune when this save is durable. Returns at once."""
        if self._operator is not None:
            self._thread.submit(self._apply, self._operator, handle)

    def close(self) -> None:
        """Return when all prunes are done. Later saves are not pruned."""
        self._operator = None
        self._thread.shutdown()

    def _apply(self, operator: StoreOperator, handle: SaveHandle) -> None:
        try:
            with suppress(SaveSkipped):
                handle.result()
        except CkptError:
            return  # the next save of the trainer raises it
        try:
            wanted = operator.plan_prune(self._prune)
            plan = wanted.within_fractions()
            if len(plan.remove) < len(wanted.remove) and not self._warned:
                self._warned = True
                logger.warning(
                    "run %s has %d checkpoints, and %d are to be kept: %d are deleted now, and more with the next "
                    "saves",
                    self._prune.run, len(wanted.decisions), len(wanted.keep), len(plan.remove),
                )  # fmt: skip
            operator.prune(self._prune, plan)
        except CkptError as error:
            logger.warning("run %s is not pruned: %s", self._prune.run, error)
        except Exception:
            logger.exception("run %s is not pruned", self._prune.run)


def add_assets(checkpointer: Checkpointer, model: Any, *others: Any) -> None:
    """Let saves have what `save_pretrained` of transformers writes beside weights, unless they have assets already.

    These are the configurations of the first of the model's modules that has them, or of its adapters, and the files of
    its `tokenizer` and of `others`. Call it before a restore, on all ranks.
    """
    if model is None or checkpointer._assets is not None:
        return
    modules, files = dict(model.named_modules()), dict[str, bytes]()
    owners = [getattr(model, "tokenizer", None), *others]
    name = next((name for name, one in modules.items() if hasattr(vars(one).get("config"), "to_diff_dict")), None)
    adapted = next((name for name, one in modules.items() if hasattr(one, "peft_config")), None)
    if adapted is not None:
        try:
            from ckpt.integrations.peft import adapter_files

            files = adapter_files(modules[adapted], module_name(f"{adapted}.".lstrip(".")))
        except (AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError):
            logger.exception("checkpoints are saved without the files of the adapters")
    elif name is not None:
        own = modules[name]
        config = copy(own.config)
        config.architectures = [type(own).__name__.removeprefix("FSDP")]
        config.dtype = getattr(own, "dtype", config.dtype)
        owners += [config, vars(own).get("generation_config")]
        if prefix := module_name(f"{name}.".lstrip(".")):
            # By which names readers know the tensors of a module inside another one.
            tensors = {id(one): (name, one) for name, one in reversed(own.state_dict(keep_vars=True).items())}
            names = {name: (prefix + name, 0, list(one.shape)) for name, one in tensors.values()}
            files[NAMES] = json.dumps(names).encode()
    with TemporaryDirectory() as folder:
        for one in owners:
            try:
                if hasattr(one, "save_pretrained"):
                    one.save_pretrained(folder)
            except Exception:
                logger.exception("checkpoints are saved without the files of a %s", type(one).__name__)
        files |= {
            path.relative_to(folder).as_posix(): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()
        }
    if files or any(hasattr(one, "save_pretrained") for one in owners):  # on all ranks alike, although one cannot write
        checkpointer._assets = files


MAX_BYTES = 4096


def write_note(path: str, checkpoint: str) -> None:
    """Write a file that names this checkpoint, on any file system of fsspec; folders above it are made."""
    with fsspec.open(path, "w", auto_mkdir=True) as file:  # type: ignore[no-untyped-call]
        json.dump({"ckptd": checkpoint}, file)


def noted(path: str) -> str | None:
    """The checkpoint that the file at this path names; None for another file, or none."""
    try:
        with fsspec.open(path, "rb") as file:  # type: ignore[no-untyped-call]
            return str(json.loads(file.read(MAX_BYTES))["ckptd"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def noted_beside(path: str) -> set[str]:
    """The checkpoints that other files in the same folder name."""
    files, own = fsspec.core.url_to_fs(path)  # type: ignore[no-untyped-call]
    folder = files._parent(own)
    small = (one["name"] for one in files.ls(folder, detail=True) if (one["size"] or 0) <= MAX_BYTES)
    found = (noted(files.unstrip_protocol(name)) for name in small if name != own)
    return set(filter(None, found))
