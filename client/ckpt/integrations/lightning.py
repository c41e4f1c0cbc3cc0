"""Lightning: a callback that saves all ranks asynchronously and restores them exactly.

    trainer = Trainer(callbacks=[CkptdCheckpoint("s3://bucket/ckpts", run="gpt", every_n_train_steps=100)])
    trainer.fit(model, ckpt_path="last")

Lightning decides when state is loaded, and asks its strategy. `Loading` answers in the strategy's place for paths that
begin with `ckptd://`, in stages: what the loops hold, the model, the optimizers, the loaders, random state.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any

import fsspec
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch import __version__ as lightning_version
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader

from ckpt.checkpointer import Checkpointer
from ckpt.data import ResumableLoader, resumable
from ckpt.integrations.keeping import Keeper, add_assets
from ckpt.integrations.lightning_io import SCHEME, drop_objects
from ckpt.restoring.pipeline import StagedRestore
from ckpt.schedule import Schedule
from ckpt.snapshot.handle import SaveHandle
from ckptapi.filesystem import CheckpointFiles
from ckptstore.errors import InvalidRequest, NoCheckpoint
from ckptstore.format.records import Policy
from ckptstore.names import Reference


class CkptdCheckpoint(ModelCheckpoint):
    """Saves and restores one run; takes the place of `ModelCheckpoint`. All ranks take part, under any strategy.

    store, run, options: as for `ckpt.Checkpointer`. every_n_train_steps: save at these global steps; every_n_epochs: at
    the end of these epochs; neither: as often as `ckpt.every()` allows. With `monitor`, also after each validation
    that has the metric. The end of training is always saved. A save at the last batch of an epoch is made when the
    epoch ends.

    save_top_k: keep the best by `monitor` and `mode`; keep_last: keep the newest. Others are deleted when a save is
    durable. With neither, nothing is deleted: policies of the store and `ckptctl prune` decide.

    `ckpt_path="last"` restores the newest usable checkpoint, or begins if there is none; "best" the best by `monitor`;
    `ckptd://RUN@STEP` that one. `checkpoint["state_dict"]` is empty in hooks that load: the model is filled in place.
    """

    def __init__(
        self,
        store: str | None = None,
        run: str | None = None,
        *,
        every_n_train_steps: int | None = None,
        every_n_epochs: int | None = None,
        monitor: str | None = None,
        mode: str = "min",
        save_top_k: int = -1,
        keep_last: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(monitor=monitor, mode=mode, save_top_k=save_top_k if monitor else -1)
        self._open = partial(Checkpointer, store, run=run, **options)
        self._checkpointer = self._open()
        self._every_steps, self._every_epochs = every_n_train_steps, every_n_epochs
        keep_best = (f"{monitor}:{mode}:{save_top_k}",) if monitor and save_top_k > 0 else ()
        self._policy = Policy(keep_last=max(1, keep_last), keep_best=keep_best) if keep_best or keep_last else None
        self._keeper = Keeper(self._checkpointer.config, None)
        self._schedule: Schedule | None = None
        self._newest: SaveHandle | None = None
        """It stays from fit to fit, as long as each continues the one before."""
        self._begin()

    def _begin(self) -> None:
        self._loading: Loading | None = None
        self._due = False
        self._step = 0
        self._validated: tuple[int, Mapping[str, float]] = (-1, {})
        """The step of the last validation, and what was logged in it or shortly before."""
        self._seen: dict[str, torch.Tensor] = {}
        """The values logged by its end: Lightning lists them for as long as no other value comes."""

    @property
    def state_key(self) -> str:
        """The store has all state of this callback."""
        return f"{type(self).__name__}{self._checkpointer.config.run_name}"

    @property
    def best_model_path(self) -> str:
        """The best checkpoint by `monitor`, from the store; empty if none has the metric."""
        with suppress(NoCheckpoint):
            if self.monitor is not None:
                best = Reference(self._checkpointer.config.run_name, name=f"best:{self.monitor}:{self.mode}")
                return SCHEME + self._checkpointer._source.find(best).id
        return ""

    @best_model_path.setter
    def best_model_path(self, path: str) -> None:
        """Lightning assigns it; the store has the answer."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Load checkpoints and wrap loaders in the strategy's place."""
        if any(isinstance(one, CkptdCheckpoint) and one is not self for one in trainer.checkpoint_callbacks):
            raise InvalidRequest(
                "the Trainer has several CkptdCheckpoint callbacks, and it can resume from one run only",
                "Use one: it takes every_n_train_steps, monitor, save_top_k and keep_last together",
            )
        self._loading = Loading(trainer, self._opened)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Bring the loaders to their positions, and random state last."""
        if self._every_steps is None and self._every_epochs is None:
            self._schedule = self._checkpointer.every()
        if trainer.is_global_zero:
            self._keeper = Keeper(self._checkpointer.config, self._policy)
        self._step = trainer.global_step
        if self._newest is not None and self._step < self._newest.step:
            self._reopen()
        add_assets(self._checkpointer, pl_module)
        if self._loading is not None and (metrics := self._loading.finish()):
            # As when it was saved: EarlyStopping looks for them at the end of an epoch that was validated before.
            self._validated = self._step, metrics
            self._seen = {name: torch.tensor(value) for name, value in metrics.items()}
            trainer.callback_metrics.update(self._seen)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Save if it is time, between two accumulation windows."""
        step, before = trainer.global_step, self._step
        self._step = step
        if step == before or self._saved(step):
            return
        if self._schedule is not None:
            self._due |= self._schedule.due(step)
        elif self._every_steps is not None:
            self._due |= step % self._every_steps == 0
        if self._due and not trainer.is_last_batch:
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        """Save if it is time, as of the beginning of the next epoch."""
        for loader in loaders(trainer).values():
            if isinstance(loader, ResumableLoader):
                loader.end_epoch()
        self._due |= self._every_epochs is not None and (trainer.current_epoch + 1) % self._every_epochs == 0
        if self._due:
            self._save(trainer)

    def on_validation_start(self, trainer: Trainer, *_: Any) -> None:
        """Other callbacks may exchange the weights for the time of a validation: they are copied before."""
        if self._newest is not None:
            self._newest.wait_staged()

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        """Save with the metrics of the validation."""
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return
        logged = self._metrics(trainer)
        self._validated, self._seen = (trainer.global_step, logged), dict(trainer.callback_metrics)
        if self.monitor in logged:
            self._save(trainer)

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        """Save the end of training."""
        if not self._saved(trainer.global_step):
            self._save(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Save if the process is to be terminated; all ranks learn of it between two steps."""
        if isinstance(exception, SIGTERMException) and trainer.training and not self._saved(trainer.global_step):
            self._save(trainer)
            self._checkpointer.wait()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Return when every save is durable and pruned."""
        self._checkpointer.close()
        if self._newest is None:
            self._reopen()  # closed, it could still save, but not read from a daemon
        self._begin()
        self._keeper.close()

    def _opened(self, fitting: bool) -> Checkpointer:
        """The Checkpointer to restore from, in a fit that continues from what it restores."""
        if fitting:
            self._reopen()
        return self._checkpointer

    def _reopen(self) -> None:
        """The next save does not continue from the last one."""
        self._checkpointer.close()
        self._checkpointer, self._newest = self._open(), None

    def _saved(self, step: int) -> bool:
        return self._newest is not None and self._newest.step == step

    def _save(self, trainer: Trainer) -> None:
        self._due = False
        if trainer.sanity_checking or trainer.fast_dev_run:
            return
        self._checkpointer._saves.looks = False
        self._newest = self._checkpointer.save_async(
            trainer.strategy.model,
            trainer.strategy.optimizers,
            trainer.global_step,
            grads=trainer.fit_loop.epoch_loop._should_accumulate(),
            metrics=self._metrics(trainer),
            shared={"trainer": trainer_state(trainer)},
            repeat_step=True,
            **loaders(trainer),
        )
        self._keeper.saved(self._newest)

    def _metrics(self, trainer: Trainer) -> dict[str, float]:
        """Metrics of the weights as they are now, without values that an earlier validation left behind."""
        step, validated = self._validated
        old = {name: value.data_ptr() for name, value in self._seen.items()}
        found = {
            name: float(value)
            for name, value in trainer.callback_metrics.items()
            if value.numel() == 1 and value.data_ptr() != old.get(name)
        }
        return {**validated, **found} if step == trainer.global_step else found

    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:
        # The ranks agree on the checkpoint when it is loaded.
        return {f"{SCHEME}{self._checkpointer.config.run_name}@latest"}


logger = logging.getLogger(__name__)


class Loading:
    """Loads one checkpoint in a strategy's place, and makes its loaders resumable."""

    def __init__(self, trainer: Trainer, open_checkpointer: Callable[[bool], Checkpointer]) -> None:
        """open_checkpointer: returns where to restore from; called with whether a fit continues from there."""
        self._trainer = trainer
        self._open = open_checkpointer
        self._stages: StagedRestore | None = None
        self._gradients: list[tuple[torch.nn.Parameter, torch.Tensor | None]] = []
        self._strategy = strategy = trainer.strategy
        for name, answer in (
            ("load_checkpoint", self._checkpoint),
            ("load_model_state_dict", self._model),
            ("load_optimizer_state_dict", self._optimizers),
            ("process_dataloader", self._loader),
        ):
            setattr(strategy, name, partial(answer, getattr(type(strategy), name).__get__(strategy)))

    def finish(self) -> Mapping[str, float]:
        """Bring the loaders to their positions, and random state last. Call it when training starts.

        Returns the metrics of the checkpoint.
        """
        stages, self._stages = self._stages, None
        if stages is None or stages.restored is None:
            return {}
        stages.extras(**loaders(self._trainer))
        stages.rng()
        for parameter, gradient in self._gradients:  # Lightning has cleared them since
            parameter.grad = gradient
        self._gradients = []
        iter(self._trainer.fit_loop._data_fetcher)  # Lightning had begun the iteration before it called a hook
        return stages.restored.checkpoint.metrics

    def _checkpoint(self, load: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
        if not str(path).startswith(SCHEME):
            return load(path, *args, **kwargs)
        fitting = self._trainer.state.fn == TrainerFn.FITTING
        checkpointer = self._open(fitting)
        add_assets(checkpointer, self._trainer.lightning_module)
        self._stages = checkpointer.restore_in_stages(
            checkpoint=str(path).removeprefix(SCHEME), strict=self._trainer.lightning_module.strict_loading
        )
        restored = self._stages.extras(trainer=None)
        if restored is None:
            logger.info("run %s has no checkpoint yet", checkpointer.config.run_name)
            return _Nothing({"pytorch-lightning_version": lightning_version})
        if self._strategy.restore_checkpoint_after_setup:
            self._stages.model(self._strategy.model)
            if fitting:
                self._stages.optimizers(self._strategy.optimizers)
        saved = restored.values["trainer"]
        loops = {**self._trainer._checkpoint_connector._get_loops_state_dict(), **saved["loops"]}
        return {"state_dict": {}, "optimizer_states": [], **saved, "loops": loops}

    def _model(self, load: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        if self._stages is None:
            load(*args, **kwargs)
        elif not self._strategy.restore_checkpoint_after_setup:
            self._stages.model(self._strategy.model)

    def _optimizers(self, load: Callable[..., Any], checkpoint: Mapping[str, Any]) -> None:
        if self._stages is None:
            load(checkpoint)
        else:
            self._stages.optimizers(self._strategy.optimizers)
            self._gradients = [(one, one.grad) for one in self._trainer.lightning_module.parameters()]

    def _loader(self, process: Callable[[Any], Any], loader: Any) -> Any:
        loader = process(loader)
        return resumable(loader) if self._trainer.training and isinstance(loader, DataLoader) else loader


class _Nothing(dict[str, Any]):
    """The state that Lightning gets for a run without a checkpoint: it then skips all that it would load."""

    def __bool__(self) -> bool:
        return False


class _Paths(CheckpointFiles):
    """Lightning asks the file system of a path when the last checkpoint was written: ours is taken before its own."""

    def __init__(self, url: str | None = None, **options: Any) -> None:
        """It needs no store for that."""
        super().__init__(url or os.environ.get("CKPT_STORE") or os.environ.get("CKPTD_URL") or "memory://", **options)

    def exists(self, path: str, **_: Any) -> bool:
        return "/" not in path.partition("@")[2] or bool(super().exists(path))  # type: ignore[no-untyped-call]

    def modified(self, path: str) -> datetime:
        return datetime.max.replace(tzinfo=UTC)


fsspec.register_implementation("ckptd", _Paths, clobber=True)  # type: ignore[no-untyped-call]


def loaders(trainer: Trainer) -> dict[str, Any]:
    """The loaders of training whose position is saved, by the names it is saved under."""
    return {
        f"loader{i or ''}": one
        for i, one in enumerate(CombinedLoader(trainer.train_dataloader).flattened)
        if hasattr(one, "state_dict") and hasattr(one, "load_state_dict")
    }


def trainer_state(trainer: Trainer) -> dict[str, Any]:
    """The state that Lightning saves, without tensors of the model and the optimizers and without positions of loaders.

    Training waits for it: so the weights are listed for hooks alone, and loops that do not train are left out.
    """
    connector, fitting = trainer._checkpoint_connector, trainer.fit_loop
    # Someone may see the checkpoint, and so the weights in it.
    hooked = any(is_overridden("on_save_checkpoint", one) for one in (trainer.lightning_module, *trainer.callbacks))
    listed = hooked and not trainer.strategy.restore_checkpoint_after_setup
    weights = trainer.lightning_module.state_dict() if listed else {}
    with (
        _answering(trainer.strategy, lightning_module_state_dict=lambda: weights, optimizer_state=lambda _: {}),
        _answering(connector, _get_loops_state_dict=lambda: {"fit_loop": fitting.state_dict()}),
        _answering(fitting, on_save_checkpoint=dict),  # it has the positions of loaders
    ):
        state: dict[str, Any] = connector.dump_checkpoint(weights_only=False)
    del state["optimizer_states"]
    if state["state_dict"] is weights:  # a callback that averages weights puts its own here
        del state["state_dict"]
    drop_objects(state)
    return state


@contextmanager
def _answering(owner: object, **methods: Callable[..., Any]) -> Iterator[None]:
    vars(owner).update(methods)
    try:
        yield
    finally:
        for name in methods:
            delattr(owner, name)
