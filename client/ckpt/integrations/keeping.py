"""The common parts of integrations: the retention that users of a framework ask for, and files that name a checkpoint.

A policy is applied to a trainer's run whenever a save has become durable; a run that a daemon looks after needs none.
Files that name a checkpoint lie at paths where a framework expects the checkpoint itself.
"""

from __future__ import annotations

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import fsspec

from ckpt.config import Config
from ckpt.snapshot.handle import SaveHandle
from ckptstore.errors import CkptError, SaveSkipped
from ckptstore.format.records import Policy
from ckptstore.operator import StoreOperator
from ckptstore.retention.pruning import Prune
from ckptstore.stores import open_store

logger = logging.getLogger(__name__)


class Keeper:
    """Deletes what a policy does not keep of one run, in a thread of its own; for the training thread of rank 0.

    A prune that fails is logged, and the next one does its work. It never deletes the newest checkpoint or a held one,
    and at most nine tenths of a run at once: a limit that is set on a long run takes effect within a few saves.
    """

    def __init__(self, config: Config, policy: Policy) -> None:
        self._prune = Prune(policy, config.run_name, grace_s=0.0)
        self._operator = StoreOperator(open_store(config.source, config.options))
        self._thread = ThreadPoolExecutor(1, "ckpt-keeper")
        self._warned = False

    def saved(self, handle: SaveHandle) -> None:
        """Prune when this save is durable. Returns at once."""
        self._thread.submit(self._apply, handle)

    def close(self) -> None:
        """Return when all prunes are done."""
        self._thread.shutdown()

    def _apply(self, handle: SaveHandle) -> None:
        try:
            with suppress(SaveSkipped):
                handle.result()
        except CkptError:
            return  # the next save of the trainer raises it
        try:
            wanted = self._operator.plan_prune(self._prune)
            plan = wanted.within_fractions()
            if len(plan.remove) < len(wanted.remove) and not self._warned:
                self._warned = True
                logger.warning(
                    "run %s has %d checkpoints, and %d are to be kept: %d are deleted now, and more with the next "
                    "saves",
                    self._prune.run, len(wanted.decisions), len(wanted.keep), len(plan.remove),
                )  # fmt: skip
            self._operator.prune(self._prune, plan)
        except CkptError as error:
            logger.warning("run %s is not pruned: %s", self._prune.run, error)
        except Exception:
            logger.exception("run %s is not pruned", self._prune.run)


MAX_BYTES = 4096


def write_note(path: str, checkpoint: str) -> None:
    """Write a file that names this checkpoint, on any file system of fsspec; folders above it are made."""
    with fsspec.open(path, "w", auto_mkdir=True) as file:  # type: ignore[no-untyped-call]
        json.dump({"ckptd": checkpoint}, file)


def noted(path: str) -> str | None:
    """The checkpoint that the file at this path names; None for another file, or none."""
    try:
        with fsspec.open(path, "rb") as file:  # type: ignore[no-untyped-call]
            head = file.read(MAX_BYTES)
        return str(json.loads(head)["ckptd"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def noted_beside(path: str) -> set[str]:
    """The checkpoints that other files in the same folder name."""
    files, own = fsspec.core.url_to_fs(path)  # type: ignore[no-untyped-call]
    folder = files._parent(own)
    small = [one["name"] for one in files.ls(folder, detail=True) if (one["size"] or 0) <= MAX_BYTES]
    found = (noted(files.unstrip_protocol(name)) for name in small if name != own)
    return {name for name in found if name is not None}
