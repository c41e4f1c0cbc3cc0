"""What a Lightning trainer saves and loads: the state of its loops and callbacks, without the tensors.

Lightning decides when state is loaded, and asks its strategy. `Loading` answers in the strategy's place for paths that
begin with `ckptd://`, in stages: what the loops hold, the model, the optimizers, the loaders, random state.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any

import fsspec
import torch
from lightning.pytorch import Trainer
from lightning.pytorch import __version__ as lightning_version
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader

from ckpt.checkpointer import Checkpointer
from ckpt.data import resumable
from ckpt.integrations.lightning_io import SCHEME, drop_objects
from ckpt.restoring.pipeline import StagedRestore

logger = logging.getLogger(__name__)


class Loading:
    """Loads one checkpoint in a strategy's place, and makes its loaders resumable."""

    def __init__(self, trainer: Trainer, open_checkpointer: Callable[[bool], Checkpointer]) -> None:
        """open_checkpointer: returns where to restore from; called with whether a fit continues from there."""
        self._trainer = trainer
        self._open = open_checkpointer
        self._stages: StagedRestore | None = None
        self._gradients: list[tuple[torch.nn.Parameter, torch.Tensor | None]] = []
        strategy = trainer.strategy
        for name, answer in (
            ("load_checkpoint", self._checkpoint),
            ("load_model_state_dict", self._model),
            ("load_optimizer_state_dict", self._optimizers),
            ("process_dataloader", self._loader),
        ):
            setattr(strategy, name, partial(answer, getattr(type(strategy), name).__get__(strategy)))

    def finish(self) -> None:
        """Bring the loaders to their positions, and random state last. Call it when training starts."""
        stages, self._stages = self._stages, None
        if stages is None or stages.restored is None:
            return
        stages.extras(**loaders(self._trainer))
        stages.rng()
        for parameter, gradient in self._gradients:  # Lightning has cleared them since
            parameter.grad = gradient
        self._gradients = []
        iter(self._trainer.fit_loop._data_fetcher)  # Lightning had begun the iteration before it called a hook

    def _checkpoint(self, load: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
        if not str(path).startswith(SCHEME):
            return load(path, *args, **kwargs)
        fitting = self._trainer.state.fn == TrainerFn.FITTING
        checkpointer = self._open(fitting)
        named = self._trainer.strategy.broadcast(str(path).removeprefix(SCHEME))
        checkpoint = None if named.endswith("@latest") else named
        self._stages = checkpointer.restore_in_stages(
            checkpoint=checkpoint, strict=self._trainer.lightning_module.strict_loading
        )
        restored = self._stages.extras(trainer=None)
        if restored is None:
            logger.info("run %s has no checkpoint yet", checkpointer.config.run_name)
            return _Nothing({"pytorch-lightning_version": lightning_version})
        if self._trainer.strategy.restore_checkpoint_after_setup:
            self._stages.model(self._trainer.strategy.model)
            if fitting:
                self._stages.optimizers(self._trainer.strategy.optimizers)
        saved = restored.values["trainer"]
        loops = {**self._trainer._checkpoint_connector._get_loops_state_dict(), **saved["loops"]}
        return {"state_dict": {}, "optimizer_states": [], **saved, "loops": loops}

    def _model(self, load: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        if self._stages is None:
            load(*args, **kwargs)
        elif not self._trainer.strategy.restore_checkpoint_after_setup:
            self._stages.model(self._trainer.strategy.model)

    def _optimizers(self, load: Callable[..., Any], checkpoint: Mapping[str, Any]) -> None:
        if self._stages is None:
            load(checkpoint)
        else:
            self._stages.optimizers(self._trainer.strategy.optimizers)
            self._gradients = [(one, one.grad) for one in self._trainer.lightning_module.parameters()]

    def _loader(self, process: Callable[[Any], Any], loader: Any) -> Any:
        loader = process(loader)
        return resumable(loader) if self._trainer.training and isinstance(loader, DataLoader) else loader


class _Nothing(dict[str, Any]):
    """What Lightning gets for a run without a checkpoint: it then skips all that it would load."""

    def __bool__(self) -> bool:
        return False


class _Paths(fsspec.AbstractFileSystem):
    """Lightning asks the file system of a path when the last checkpoint was written: ours is taken before its own."""

    protocol = "ckptd"

    def exists(self, path: str, **_: Any) -> bool:
        return True

    def modified(self, path: str) -> datetime:
        return datetime.max.replace(tzinfo=UTC)


fsspec.register_implementation("ckptd", _Paths, clobber=True)  # type: ignore[no-untyped-call]


def loaders(trainer: Trainer) -> dict[str, Any]:
    """The loaders of training whose position is saved, by the names it is saved under."""
    found = CombinedLoader(trainer.train_dataloader).flattened
    stateful = {i: one for i, one in enumerate(found) if hasattr(one, "state_dict") and hasattr(one, "load_state_dict")}
    return {f"loader{i or ''}": one for i, one in stateful.items()}


def trainer_state(trainer: Trainer) -> dict[str, Any]:
    """What Lightning saves, without the tensors of the model and the optimizers and without positions of loaders.

    Training waits for it: so the weights are listed for hooks alone, and loops that do not train are left out.
    """
    connector, fitting = trainer._checkpoint_connector, trainer.fit_loop
    listed = not trainer.strategy.restore_checkpoint_after_setup and _have_save_hooks(trainer)
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


def _have_save_hooks(trainer: Trainer) -> bool:
    """Whether someone sees the checkpoint, and so the weights in it."""
    owners = (trainer.lightning_module, *trainer.callbacks)
    return any(is_overridden("on_save_checkpoint", one) for one in owners)


@contextmanager
def _answering(owner: object, **methods: Callable[..., Any]) -> Iterator[None]:
    vars(owner).update(methods)
    try:
        yield
    finally:
        for name in methods:
            delattr(owner, name)
