"""torchtitan: a checkpoint manager, asynchronous and exact, in place of its own.

    checkpoint=CkptdManager.Config(enable=True, store="s3://bucket/ckpts", run="llama3", interval=500)

torchtitan decides when: the trainer calls `load` once, `save` after each step, and `maybe_wait_for_staging` before the
optimizers step. Its policies (`interval`, `keep_latest_k`, `load_only`, ...) keep their meaning.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader
from torchtitan.components.checkpointer import DATALOADER, LR_SCHEDULER, OPTIMIZER, BaseCheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer
from torchtitan.tools import filesystem

from ckpt.capture.modules import canonical
from ckpt.checkpointer import Checkpointer
from ckpt.integrations.keeping import Keeper
from ckptstore.errors import InvalidRequest
from ckptstore.format.records import Policy
from ckptstore.names import Reference
from ckptstore.reading.assets import NAMES
from ckptstore.reading.weights import Part

logger = logging.getLogger(__name__)

_RUN = "torchtitan"
_ASSETS = (".json", ".jinja", ".model", ".txt")


class CkptdManager(BaseCheckpointManager):
    """Saves and restores the state of a torchtitan Trainer; for the training thread of each rank.

    A save returns when the state is copied or is being copied; the step of the optimizers waits for the copy. The model
    is the item `model`, the optimizers are `optim`, under torchtitan's names of parameters. Everything else, random
    state included, is kept per rank.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """torchtitan's policies, and where checkpoints are."""

        store: str | None = None
        """A path or URL. Default: CKPT_STORE, or else `folder` in the dump folder."""
        run: str | None = None
        """The training lineage. Default: CKPT_RUN, or else "torchtitan"."""
        daemon: str | None = None
        """URL of ckptd. Default: CKPTD_URL."""

        def __post_init__(self) -> None:
            """Raises ValueError, or InvalidRequest for what this manager does not do."""
            BaseCheckpointManager.Config.__post_init__(self)
            for name in ("last_save_in_hf", "initial_load_in_hf"):
                if getattr(self, name):
                    raise InvalidRequest(
                        f"checkpoint.{name} is not supported by CkptdManager",
                        "Convert with `ckptctl export` and `ckptctl import`, or use torchtitan's own manager once",
                    )

    def __init__(
        self,
        config: Config,
        *,
        dataloader: BaseDataLoader | None,
        model_parts: list[nn.Module],
        optimizers: OptimizersContainer[Any],
        lr_schedulers: LRSchedulersContainer,
        states: dict[str, Any],
        sd_adapter: Any = None,
        base_folder: str = "",
    ) -> None:
        """Made by `Config.build`, as torchtitan does. Raises InvalidRequest or InvalidName.

        sd_adapter: its names of Hugging Face and the files of its `hf_assets_path` are read, and saved for readers.
        """
        self.enable = config.enable
        self.save_future = None
        if not self.enable:
            return
        self._config = config
        store = config.store or os.environ.get("CKPT_STORE") or filesystem.join(base_folder, config.folder)
        run = config.run or os.environ.get("CKPT_RUN") or _RUN
        assets = _readers_files(sd_adapter, model_parts) if sd_adapter is not None else None
        self._checkpointer = Checkpointer(store, run=run, daemon=config.daemon, assets=assets)
        self._model: Any = model_parts[0] if len(model_parts) == 1 else model_parts
        self._optimizers = list(optimizers)
        self._dataloader = dataloader
        self._extras = {**states, LR_SCHEDULER: lr_schedulers}
        if dataloader is not None:
            self._extras[DATALOADER] = dataloader
        if unknown := set(config.exclude_from_loading) - {OPTIMIZER, *self._extras}:
            raise InvalidRequest(
                f"checkpoint.exclude_from_loading names {sorted(unknown)}, which is not saved",
                f"Use {', '.join((OPTIMIZER, *self._extras))}",
            )
        keeps = config.keep_latest_k > 0 and not config.load_only and self._checkpointer._is_first()
        policy = Policy(keep_last=config.keep_latest_k) if keeps else None
        self._keeper = Keeper(self._checkpointer.config, policy)

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        config = self._config
        first = curr_step == 1 and config.enable_first_step_checkpoint
        if config.load_only or not (first or last_step or curr_step % config.interval == 0):
            return False
        if last_step and config.last_save_model_only:
            handle = self._checkpointer.save_async(self._model, None, curr_step)
        else:
            handle = self._checkpointer.save_async(self._model, self._optimizers, curr_step, **self._extras)
        self.save_future = cast(Any, handle)  # has the methods of a future
        self._keeper.saved(handle)
        if last_step:
            self._wait_for_saving()
        return True

    def _load(self, step: int = -1) -> bool:
        stages = self._checkpointer.restore_in_stages(checkpoint=None if step == -1 else step)
        restored = stages.model(self._model)
        if restored is None:
            return self._load_initial()
        if restored.step == 0:  # a seed checkpoint: training begins with its model
            return True
        excluded = self._config.exclude_from_loading
        if OPTIMIZER not in excluded:
            stages.optimizers(self._optimizers)
        stages.extras(**{name: value for name, value in self._extras.items() if name not in excluded})
        stages.rng()
        if isinstance(self._dataloader, DataLoader) and self._dataloader.generator is None:
            # The trainer makes its iterator next, which would draw a seed from the random state just restored.
            self._dataloader.generator = torch.Generator().manual_seed(torch.initial_seed())
        return True

    def _load_initial(self) -> bool:
        """Begin with the state of another run, STORE/RUN@STEP: its model, or everything."""
        path = self._config.initial_load_path
        if path is None:
            return False
        store, _, name = path.rpartition("/")
        with Checkpointer(store, run=Reference.parse(name).run) as other:
            if self._config.initial_load_model_only:
                other.restore(self._model, checkpoint=name, rng=False)
            else:
                other.restore(self._model, self._optimizers, checkpoint=name, **self._extras)
        return True

    def _maybe_wait_for_staging(self) -> None:
        """Nothing: the step of each optimizer waits by itself, on a GPU without making the CPU wait."""

    def _wait_for_saving(self) -> None:
        assert self.save_future is not None
        self.save_future.result()
        self.save_future = None

    def _close(self) -> None:
        self._keeper.close()
        self._checkpointer.close()


class _Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes of what tensors on meta are copies, to find out which elements of which tensor they have."""

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._state, self._names = state, {_storage(tensor): name for name, tensor in state.items()}
        self._copies = dict[int, tuple[torch.Tensor, torch.Tensor]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.clone.default:
            self._copies[_storage(made)] = made, args[0]
        return made

    def part(self, tensor: torch.Tensor) -> Part | None:
        """The tensor as a part of one of the state; None unless it is a view of one, or a copy of all of a view."""
        shape, home, flat = tuple(tensor.shape), _storage(tensor), tensor.is_contiguous()
        if (name := self._names.get(home)) is None:
            made, source = self._copies.get(home, (tensor, None))
            same = flat and made.is_contiguous() and made.numel() == tensor.numel()
            found = self.part(source) if same and source is not None else None
            return found and found._replace(shape=shape)
        axes = () if flat else tuple(axis for axis in zip(shape, tensor.stride(), strict=True) if axis[0] != 1)
        part = Part(name, int(tensor.storage_offset()), shape, axes)
        return part if part.fits(tuple(self._state[name].shape)) else None


def _readers_files(adapter: Any, model_parts: list[nn.Module]) -> dict[str, Path | bytes]:
    """The files of a Hugging Face model without its weights, and the names by which readers know this model's weights.

    A name may denote a part of a tensor, such as an expert, or have its elements in another order, such as the rows of
    q and k. A model whose values `to_hf` computes gets no names.
    """
    state = {
        canonical(name): torch.empty(value.shape, dtype=value.dtype, device="meta")
        for part in model_parts
        for name, value in part.state_dict().items()
    }
    with _Copies(state) as copies:
        named = adapter.to_hf(dict(state))
    parts = {name: copies.part(tensor) for name, tensor in named.items()}
    changed = [name for name, part in parts.items() if part is None]
    files: dict[str, Path | bytes] = {
        path.name: path
        for path in (Path(adapter.hf_assets_path).glob("*") if adapter.hf_assets_path else ())
        if path.suffix in _ASSETS and ".safetensors" not in path.name
    }
    if changed:
        logger.info("readers get the module's names: to_hf changes %s", ", ".join(changed[:3]))
        return files
    return {**files, NAMES: json.dumps(parts).encode()}


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
