"""Objects that a training loop uses and does not save: looked for after the first save, and reported by a warning."""

from __future__ import annotations

import gc
import logging
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, SequentialSampler

from ckpt.capture.train_state import Resumable, Stateful, TrainState
from ckptstore.format.trees import value_leaves

logger = logging.getLogger(__name__)

_SAMPLED = 3

_used: weakref.WeakKeyDictionary[Optimizer, set[tuple[int, int]]] = weakref.WeakKeyDictionary()
"""The gradients at the last step of each optimizer, by identity and version."""
_steps = [0]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _after_step(optimizer: Optimizer, *_: object) -> None:
    # Not before it: a closure makes the gradients within the step.
    _steps[0] += 1
    _used[optimizer] = {(id(one), one._version) for one in _gradients(optimizer)}


register_optimizer_step_post_hook(_after_step)


def optimizer_steps() -> int:
    """The number of steps of all optimizers since this module was loaded."""
    return _steps[0]


def unsaved_gradients(state: TrainState, read: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], bool]:
    """Whether the next step uses gradients of before this save, which it leaves out. For the training thread.

    Gradients that are the same as at the last step are used up, a zero one adds nothing, and a GradScaler skips the
    step of one with Inf or NaN. A few of each optimizer are looked at. read: begins to read a tensor, so that a GPU is
    not waited for; the result is called afterwards.
    """
    found = [
        read(torch.linalg.vector_norm(local, math.inf))
        for optimizer in chain(*state.optimizers.values())
        if (used := _used.get(optimizer)) is not None
        for one in _gradients(optimizer)
        if (id(one), one._version) not in used
        if (local := getattr(one, "_local_tensor", one)).numel() and local.element_size() > 1  # float8 has no norm
    ]
    return lambda: any(map(bool, found)) and all(map(torch.isfinite, found))


def _gradients(optimizer: Optimizer) -> list[torch.Tensor]:
    """Gradients of the first and last parameters of groups."""
    held = [group["params"] for group in optimizer.param_groups[-2 * _SAMPLED :]]
    some = {id(one): one.grad for params in held for one in (*params[:_SAMPLED], *params[-_SAMPLED:])}
    return [one for one in some.values() if one is not None and one.layout is torch.strided]


def look_for_unsaved(state: TrainState) -> Callable[[], None]:
    """A look for objects that this state does not have, for any thread: it holds nothing of the state but scalers.

    It logs a warning for a GradScaler that scales, and for a shuffled DataLoader if no loader is saved. It visits all
    objects that the garbage collector knows, 0.1 µs each: 30 ms in a process with 285,000, in one call of the
    interpreter. So it is no part of a save. Schedulers, optimizers, and parameters in no saved module are reported at
    once.
    """
    saved = list(_reachable((*state.others.values(), *state.shared.values())))
    if (names := _unsaved_parameters(state, saved)) and state.modules:
        logger.warning(
            "parameters of the optimizers are in no saved module (%s): their values start again after a restore; pass "
            "what holds them to saves and restores, such as loss=criterion",
            ", ".join(names[:3]) + ", ..." * (len(names) > 3),
        )
    if kinds := _unsaved_optimizers(state):
        logger.warning(
            "an optimizer of saved parameters, %s, is not saved: its state starts again after a restore; pass it to "
            "saves and restores",
            kinds[0],
        )
    # A scheduler marks the step that it wraps.
    scheduled = any(hasattr(one.step, "_wrapped_by_lr_sched") for one in chain(*state.optimizers.values()))
    if scheduled and not any(
        "last_epoch" in one if isinstance(one, dict) else hasattr(one, "last_epoch") for one in saved
    ):
        logger.warning(
            "an optimizer has a scheduler that is not saved: the learning rate starts again after a restore; pass "
            "scheduler=scheduler to saves and restores"
        )
    scalers = [one for one in saved if isinstance(one, GradScaler)]
    return partial(_look, scalers, any(isinstance(one, (Resumable, DataLoader)) for one in saved))


def _unsaved_parameters(state: TrainState, saved: Iterable[Any]) -> list[str]:
    """Names of the trained parameters that are neither in a module nor an extra, or in the state of one."""
    leaves = [leaf for named in state.named_optimizers.values() for one in named for leaf in one.leaves.values()]
    left = [leaf for leaf in leaves if id(leaf.value) not in state.parameters.leaves and leaf.value.requires_grad]
    if left:
        held = [one.state_dict() if isinstance(one, Stateful) else one for one in saved]
        found = {one.data_ptr() for _, one in value_leaves(held, "") if isinstance(one, torch.Tensor)}
        left = [leaf for leaf in left if leaf.value.data_ptr() not in found]
    return [leaf.path for leaf in left]


def _unsaved_optimizers(state: TrainState) -> list[str]:
    """The classes of those that have stepped and keep state of saved parameters. One that wraps another keeps none."""
    saved = set(map(id, _reachable(chain(*state.optimizers.values()))))
    alone = (one for one in list(_used) if not any(isinstance(value, Optimizer) for value in vars(one).values()))
    found = (one for one in alone if any(id(key) in state.parameters.leaves for key in one.state))
    return [type(one).__name__ for one in found if id(one) not in saved]


def _look(saved: Sequence[GradScaler], positioned: bool) -> None:
    kinds: list[type[Any]] = [GradScaler, DataLoader]
    for kind in kinds:
        kinds += kind.__subclasses__()
    # An object refers to its class. To type() every object takes three times as long.
    living = [one for one in gc.get_referrers(*kinds) if type(one) in kinds]
    scalers = [one for one in living if isinstance(one, GradScaler) and one.is_enabled() and one._scale is not None]
    if scalers and not any(one is scaler for one in saved for scaler in scalers):
        logger.warning(
            "a GradScaler is in use and is not saved: its scale starts again after a restore; pass scaler=scaler to "
            "saves and restores"
        )
    loaders = [one for one in living if isinstance(one, DataLoader) and _shuffles(one)]
    if loaders and not positioned:
        logger.warning(
            "a shuffled DataLoader is in use and its position is not saved: a resumed run gets other batches and other "
            "random numbers; iterate over loader = ckpt.data.resumable(loader) and pass loader=loader"
        )


def _reachable(values: Iterable[Any]) -> Iterator[Any]:
    """The saved objects and what they hold directly, such as a loop's own state object."""
    for value in values:
        yield value
        yield from value.values() if isinstance(value, dict) else getattr(value, "__dict__", {}).values()


def _shuffles(loader: DataLoader[Any]) -> bool:
    """Whether its order is not that of the data set. A loader for validation usually keeps that."""
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    return sampler is not None and type(sampler) is not SequentialSampler and hasattr(loader.dataset, "__getitem__")
