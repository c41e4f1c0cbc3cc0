"""Objects that a training loop uses and does not save: looked for after the first save, and reported by a warning."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, SequentialSampler

from ckpt.capture.train_state import Resumable, TrainState

logger = logging.getLogger(__name__)

_KINDS = (GradScaler, DataLoader)


_SAMPLED = 3


class UnsavedGradients:
    """Gradients that the next step uses, and a save without `grads=True` leaves out. For the training thread.

    Gradients that have not changed since the last step are used up, and a zero one adds nothing. A few of each
    optimizer are looked at. A GPU is asked whether they are zero without waiting for it.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        """The steps of all optimizers since this was made."""
        self._used: weakref.WeakKeyDictionary[Optimizer, list[_Mark]] = weakref.WeakKeyDictionary()
        self._warned = False
        weakref.finalize(self, register_optimizer_step_pre_hook(_hook(weakref.ref(self))).remove)

    def stepping(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step."""
        self.num_steps += 1
        self._used[optimizer] = [(weakref.ref(one), one._version) for one in _gradients(optimizer)]

    @torch.no_grad()
    def look(
        self, state: TrainState, read: Callable[[torch.Tensor], torch.Tensor], later: Callable[..., object]
    ) -> None:
        """Log a warning, once, if this save is within an accumulation window.

        read: begins to read a tensor. later: gets what is to be called once it is read.
        """
        found: list[torch.Tensor] = []
        for optimizer in chain(*state.optimizers.values()):
            held = _gradients(optimizer)
            used = {id(mark()): version for mark, version in self._used.get(optimizer, ())}
            if optimizer in self._used:
                found += [one for one in held if used.get(id(one)) != one._version]
            self._used[optimizer] = [(weakref.ref(one), one._version) for one in held]
        if found and not self._warned:
            flags = [read(getattr(one, "_local_tensor", one).any()) for one in found]
            later(lambda: self._warn(flags))

    def _warn(self, flags: Sequence[torch.Tensor]) -> None:
        if any(map(bool, flags)) and not self._warned:
            self._warned = True
            logger.warning(
                "a save was made between a backward pass and the step of its optimizer, and gradients are not saved: a "
                "resumed run goes on without them; save after the step, or pass grads=True"
            )


_Mark = tuple[Callable[[], torch.Tensor | None], int]


def _hook(reference: weakref.ref[UnsavedGradients]) -> Any:
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before_step(optimizer: Optimizer, *_: object) -> None:
        if (gradients := reference()) is not None:
            gradients.stepping(optimizer)

    return before_step


def _gradients(optimizer: Optimizer) -> list[torch.Tensor]:
    """Gradients of the first and last parameters of groups."""
    held = [group["params"] for group in optimizer.param_groups[-2 * _SAMPLED :]]
    some = {id(one): one for params in held for one in (*params[:_SAMPLED], *params[-_SAMPLED:])}
    return [one.grad for one in some.values() if one.grad is not None and one.grad.layout is torch.strided]


def look_for_unsaved(state: TrainState) -> Callable[[], None]:
    """A look for objects that this state does not have, for any thread: it holds nothing of the state but scalers.

    It logs a warning for a GradScaler that scales, and for a shuffled DataLoader if no loader is saved. It visits all
    objects that the garbage collector knows, 0.1 µs each: 30 ms in a process with 285,000, in one call of the
    interpreter. So it is no part of a save.
    """
    saved = list(_reachable((*state.others.values(), *state.shared.values())))
    scalers = [one for one in saved if isinstance(one, GradScaler)]
    return partial(_look, scalers, any(isinstance(one, (Resumable, DataLoader)) for one in saved))


def _look(saved: Sequence[GradScaler], positioned: bool) -> None:
    living = list(_living())
    scalers = [one for one in living if isinstance(one, GradScaler) and _scales(one)]
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


def _living() -> Iterator[Any]:
    """The scalers and loaders of this process."""
    kinds = tuple({kind for base in _KINDS for kind in _with_subclasses(base)})
    # An object refers to its class. To type() every object takes three times as long.
    return (one for one in gc.get_referrers(*kinds) if type(one) in kinds)


def _with_subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    for below in kind.__subclasses__():
        yield from _with_subclasses(below)


def _reachable(values: Iterable[Any]) -> Iterator[Any]:
    """The saved objects and what they hold directly, such as a loop's own state object."""
    for value in values:
        yield value
        yield from vars(value).values() if hasattr(value, "__dict__") else ()


def _scales(scaler: GradScaler) -> bool:
    return scaler.is_enabled() and getattr(scaler, "_scale", None) is not None


def _shuffles(loader: DataLoader[Any]) -> bool:
    """Whether its order is not that of the data set. A loader for validation usually keeps that."""
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    return sampler is not None and type(sampler) is not SequentialSampler and hasattr(loader.dataset, "__getitem__")
