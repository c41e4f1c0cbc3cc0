"""Training loops: `for step in ckpt.steps(...)` restores before the first step, saves what is due, and the last step.

    for step in ckpt.steps(model, optim, 1000, scheduler=sched): ...

A loop decides nothing itself: a `Schedule` says when to save, and the caller of `Loop` how to.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, cast

from ckpt import default
from ckpt.checkpointer import Checkpointer
from ckpt.restoring.pipeline import Restored
from ckpt.schedule import Schedule
from ckptstore.errors import InvalidRequest
from ckptstore.reading.assets import ASSETS

if TYPE_CHECKING:
    from ckpt.capture.train_state import Model, Optimizers
    from ckpt.data import ResumableLoader


@dataclass(eq=False, repr=False)
class Loop(ABC, Iterator[int]):
    """Iterate over it once, on the training thread. Nothing is saved for a loop that is left by `break` or an error."""

    _checkpointer: Checkpointer
    _save: Callable[[int], object]
    """Begins a save of this step."""
    _given: Schedule | int | None
    step: int
    """The number of the step that is being trained, or was last."""
    restored: Restored | None
    """The checkpoint that the loop goes on from; None: it begins, or its caller has restored."""
    _end: int
    """The number to stop before."""

    def __post_init__(self) -> None:
        if isinstance(self._given, int) and self._given < 1:
            raise InvalidRequest(f"a save after every {self._given} steps", "Give a positive number, or a Schedule")
        self.schedule = self._checkpointer.every() if self._given is None else self._given
        self._saved, self._numbers = self.step, self._run()

    def __next__(self) -> int:
        return next(self._numbers)

    @abstractmethod
    def _run(self) -> Iterator[int]:
        """The numbers that the loop is over."""

    @property
    def stopped(self) -> bool:
        """Whether the loop ends early, because of a preemption: exit with `schedule.exit_code`."""
        return isinstance(self.schedule, Schedule) and self.schedule.stop

    def _trained(self) -> None:
        """Save if that is due after this step."""
        step, schedule = self.step, self.schedule
        if step % schedule == 0 if isinstance(schedule, int) else schedule.due(step):
            self._save(step)
            self._saved = step

    def _finish(self) -> None:
        """Save the last step, unless a preemption leaves no time for it; durable on return."""
        self._checkpointer.wait()
        if self._saved != self.step and not self.stopped:
            self._save(self.step)
            self._checkpointer.wait()


class Steps(Loop):
    """The steps from one number to another."""

    def _run(self) -> Iterator[int]:
        for step in range(self.step + 1, self._end):
            self.step = step
            yield step
            self._trained()
            if self.stopped:
                break
        self._finish()


@dataclass(eq=False, repr=False)
class Epochs(Loop):
    """The epochs that a resumable loader has left; its batches are the steps."""

    _loader: ResumableLoader[Any]

    def _run(self) -> Iterator[int]:
        with self._loader.observed(self._begins, self._goes_on):
            for epoch in range(self._loader.epoch, self._end):
                self._loader.set_epoch(epoch)
                yield epoch
                if self.stopped:
                    break
        self._finish()

    def _begins(self) -> None:
        self.step += 1

    def _goes_on(self) -> bool:
        self._trained()
        return not self.stopped


def steps(
    model: Model | None,
    optim: Optimizers | None,
    num_steps: int,
    /,
    *,
    schedule: Schedule | int | None = None,
    checkpointer: Checkpointer | None = None,
    shared: Mapping[str, Any] | None = None,
    **extras: Any,
) -> Steps:
    """The steps that are left of `range(num_steps)`, after a restore; saves after those that are due and the last one.

        for step in ckpt.steps(model, optim, 1000, scheduler=sched, loader=loader): ...

    model, optim, shared, extras: as for `save_async`; they are copied when training asks for the next step. Dicts,
    lists and dataclasses among them are filled with what was restored, so that training goes on with them. schedule:
    from `every`, which is also the default, or a number: save after each step that it divides. A schedule ends the
    loop at a preemption (`on_preemption`). checkpointer: by default that of `init`. When the loop ends, its last step
    is durable; a run that was trained to the end has no steps left. A collective of all ranks. Raises what `restore`
    and `save_async` raise.
    """
    target, save, restored = _resumed(checkpointer, model, optim, {"shared": shared, **extras})
    return Steps(target, save, schedule, restored.step if restored else -1, restored, num_steps)


def epochs(
    model: Model | None,
    optim: Optimizers | None,
    num_epochs: int,
    /,
    *,
    loader: ResumableLoader[Any],
    schedule: Schedule | int | None = None,
    checkpointer: Checkpointer | None = None,
    shared: Mapping[str, Any] | None = None,
    **extras: Any,
) -> Epochs:
    """The epochs that are left of `range(num_epochs)`, after a restore, each set as the epoch of the loader.

        for epoch in ckpt.epochs(model, optim, 10, scheduler=sched, loader=loader):
            for batch in loader: ...

    loader: a `ckpt.data.resumable` one; the first epoch begins where the checkpoint was saved. A batch is a step,
    counted from 1 since the beginning of the run. A save is made when training asks for the next batch. The rest is as
    for `steps`; at a preemption the batches end, and then the epochs.
    """
    target, save, restored = _resumed(checkpointer, model, optim, {"shared": shared, "loader": loader, **extras})
    return Epochs(target, save, schedule, restored.step if restored else 0, restored, num_epochs, loader)


def _resumed(
    checkpointer: Checkpointer | None, model: Model | None, optim: Optimizers | None, objects: dict[str, Any]
) -> tuple[Checkpointer, Callable[[int], object], Restored | None]:
    """The Checkpointer, what saves a step of these objects, and what they were restored from."""
    target = checkpointer or default.current()
    save = partial(target.save_async, model, optim, **objects)
    objects.pop(ASSETS, None)
    restored = target.restore(model, optim, **objects)
    refill(restored, objects)
    return target, save, restored


def refill(restored: Restored | None, objects: Mapping[str, Any]) -> None:
    """Fill dicts, lists and dataclasses, which the next save stores again, with what was restored for them.

    objects: what a restore was given by keyword, `shared` included.
    """
    for name, given in {**objects, **(objects.get("shared") or {})}.items():
        if restored is not None and name in restored.values:
            _refilled(given, restored.values[name])


def _refilled(given: Any, found: Any) -> Any:
    """The given container with the values that were found; other values as they were found."""
    if type(given) is not type(found) or given is found:
        return found
    if isinstance(given, dict):
        items = [(key, _refilled(given.get(key), value)) for key, value in found.items()]
        given.clear()
        given.update(items)
    elif isinstance(given, list):
        given[:] = [_refilled(before, value) for before, value in zip_longest(given[: len(found)], found)]
    elif is_dataclass(given) and not cast(Any, given).__dataclass_params__.frozen:
        for field in fields(given):
            setattr(given, field.name, _refilled(getattr(given, field.name), getattr(found, field.name)))
    else:
        return found
    return given
