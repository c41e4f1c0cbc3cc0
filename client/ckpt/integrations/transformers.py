"""transformers: the checkpoints of a Trainer, asynchronous, of all ranks and exact.

    trainer = keep_checkpoints(Trainer(...), "s3://bucket/ckpts", run="gpt")
    trainer.train(resume_from_checkpoint=True)

A callback of transformers does not get the trainer, and the trainer saves by itself. So the trainer itself gets other
methods, those that save and load; it decides as before when they are called, for any subclass (TRL, Axolotl).
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

from torch import nn
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState

from ckpt.checkpointer import Checkpointer
from ckpt.integrations.keeping import Keeper, add_assets
from ckptstore.errors import NoCheckpoint
from ckptstore.format.records import Policy

logger = logging.getLogger(__name__)

SCHEME = "ckptd://"

_T = TypeVar("_T", bound=Trainer)


def keep_checkpoints(trainer: _T, store: str | None = None, run: str | None = None, **options: Any) -> _T:
    """Let this trainer save to and resume from a run; returns it. Call it on all ranks, before `train`.

    store, run, options: as for `ckpt.Checkpointer`. The training arguments keep their meaning: when to save,
    `save_only_model`, `save_total_limit`, `metric_for_best_model` and `load_best_model_at_end`; the last two keep the
    best checkpoint beside the newest. Without `save_total_limit` nothing is deleted.

    `train(resume_from_checkpoint=True)` restores the newest usable checkpoint, or begins if there is none;
    "ckptd://RUN@STEP" that one, and the path of a folder what transformers saved there. When `train` returns, every
    save is durable.
    """
    cls = type(trainer)
    trainer.__class__ = type(f"Ckptd{cls.__name__}", (_CkptdTrainer, cls), {})
    assert isinstance(trainer, _CkptdTrainer)
    trainer._begin(Checkpointer(store, run=run, **options))
    return trainer


class _CkptdTrainer(Trainer):
    """The methods that save and load. Those with other arguments than ours are left to the class below."""

    def _begin(self, checkpointer: Checkpointer) -> None:
        self._checkpointer = checkpointer
        self._config = checkpointer.config
        self._keeper = Keeper(self._config, None)
        self._stages: Any = None
        """The restore that a training begins with."""
        self._folder = ""
        """The files that the trainer reads in a resume before it calls the methods below; made for each training."""
        self._last_saved: int | None = None
        self._saved: Mapping[str, Any] = {}

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        if self._last_saved is not None:  # its steps begin again: in a new session
            self._checkpointer.close()
            self._checkpointer = Checkpointer(**vars(self._config))
        self._last_saved = None
        collator = getattr(self.data_collator, "tokenizer", None)
        add_assets(self._checkpointer, self.model, collator, getattr(self, "processing_class", None))
        if self.args.save_total_limit and self.args.should_save:
            self._keeper = Keeper(self._config, self._policy())
        try:
            with tempfile.TemporaryDirectory() as self._folder:
                if resume_from_checkpoint is True:
                    resume_from_checkpoint = f"{SCHEME}{self._config.run_name}@latest"
                if str(resume_from_checkpoint).startswith(SCHEME):
                    resume_from_checkpoint = self._open(str(resume_from_checkpoint))
                done = super().train(resume_from_checkpoint, *args, **kwargs)
            self._checkpointer.wait()
            self._name_best()
            return done
        finally:
            self._stages = None
            self._keeper.close()

    def _open(self, path: str) -> str | None:
        """Begin a restore. Returns the folder; None without a checkpoint."""
        self._stages = self._checkpointer.restore_in_stages(checkpoint=path.removeprefix(SCHEME))
        restored = self._stages.extras(trainer=None)
        if restored is None:
            logger.info("run %s has no checkpoint yet", self._config.run_name)
            return None
        self._saved = restored.values["trainer"]
        (Path(self._folder) / TRAINER_STATE_NAME).write_text(self._saved["state"])
        return self._folder

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if resume_from_checkpoint != self._folder:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            self._stages.model(model or self.model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint != self._folder:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        self._name_best()  # the trainer has dropped the name: it looks for a folder
        if "scheduler" not in self._saved:
            logger.warning("the checkpoint was saved with save_only_model: optimizer and schedule start again")
            return
        self._stages.optimizers(self._raw_optimizer())
        self.lr_scheduler.load_state_dict(self._saved["scheduler"])

    def _load_scaler(self, checkpoint: str | None) -> None:
        if checkpoint != self._folder:
            super()._load_scaler(checkpoint)
        elif "scaler" in self._saved:
            self.accelerator.scaler.load_state_dict(self._saved["scaler"])

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint != self._folder:
            super()._load_rng_state(checkpoint)
        else:
            self._stages.rng()

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        step = self.state.global_step
        if step == self._last_saved:  # the end of an epoch, after a save by steps
            return
        self.store_flos()
        self._name_best()
        self._checkpointer._saves.looks = False
        handle = self._checkpointer.save_async(
            model,
            None if self.args.save_only_model else self._raw_optimizer(),
            step,
            metrics=_metrics(self.state.log_history, step),
            shared={"trainer": self._trainer_state()},
            repeat_step=True,
        )
        self._last_saved = step
        self._keeper.saved(handle)

    def _name_best(self) -> None:
        """Name the best checkpoint, if there is one: without a name the trainer does not load it at the end."""
        if self.args.load_best_model_at_end and self.state.best_global_step:
            self.state.best_model_checkpoint = f"{SCHEME}{self._config.run_name}@{self.state.best_global_step}"

    def _load_best_model(self) -> None:
        if not str(self.state.best_model_checkpoint).startswith(SCHEME):
            super()._load_best_model()
            return
        self.state.best_model_checkpoint = None  # with a limit of 1 the trainer compares the path with those of folders
        self._checkpointer.wait()
        metric, mode = self._metric()
        try:
            self._checkpointer.restore(self.model, checkpoint=f"best:{metric}:{mode}", rng=False)
        except NoCheckpoint:
            logger.warning("run %s has no checkpoint with %s: the newest weights stay", self._config.run_name, metric)

    def _trainer_state(self) -> dict[str, Any]:
        states: dict[str, Any] = {}
        for one in (*self.callback_handler.callbacks, self.control):
            if isinstance(one, ExportableState):
                name = type(one).__name__
                several = isinstance(self.state.stateful_callbacks.get(name), list)
                states[name] = [*states.get(name, []), one.state()] if several else one.state()
        state = vars(self.state) | {"stateful_callbacks": states, "best_model_checkpoint": None}
        saved: dict[str, Any] = {"state": json.dumps(state)}
        if not self.args.save_only_model:
            saved["scheduler"] = self.lr_scheduler.state_dict()
            if (scaler := getattr(self.accelerator, "scaler", None)) is not None:
                saved["scaler"] = scaler.state_dict()
        return saved

    def _raw_optimizer(self) -> Any:
        return getattr(self.optimizer, "optimizer", self.optimizer)  # Accelerate wraps it

    def _metric(self) -> tuple[str, str]:
        name = self.args.metric_for_best_model or "loss"
        return name if name.startswith("eval_") else f"eval_{name}", "max" if self.args.greater_is_better else "min"

    def _policy(self) -> Policy:
        if not self.args.load_best_model_at_end:
            return Policy(keep_last=self.args.save_total_limit)
        metric, mode = self._metric()
        return Policy(keep_last=max(1, self.args.save_total_limit - 1), keep_best=(f"{metric}:{mode}:1",))


def _metrics(history: list[dict[str, Any]], step: int) -> dict[str, float]:
    """The values that were logged at this step."""
    logged: dict[str, float] = {}
    for entry in takewhile(lambda entry: entry.get("step") == step, reversed(history)):
        numbers = {name: float(value) for name, value in entry.items() if isinstance(value, int | float)}
        logged = numbers | logged
    return {name: value for name, value in logged.items() if name not in ("step", "epoch")}
