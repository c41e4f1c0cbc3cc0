"""The module functions: one Checkpointer for the process, made by `init` or, from the environment, by first use; and
those that need only a store or daemon."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import wraps
from types import MethodType
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar, cast

from ckpt.checkpointer import Checkpointer
from ckpt.config import Config
from ckpt.restoring.pipeline import load_tensors
from ckptapi.opening import open_source
from ckptstore import human
from ckptstore.commits.catalog import Checkpoint, named
from ckptstore.errors import NoCheckpoint
from ckptstore.names import Reference, check_run, name_of
from ckptstore.operator import StoreOperator
from ckptstore.reading.source import Source, StoreSource, suggest_run
from ckptstore.retention.deletion import SWEEP_GRACE_S

if TYPE_CHECKING:
    from ckpt.following import NewWeights
    from ckptapi.client import DaemonClient

_P = ParamSpec("_P")
_T = TypeVar("_T")

_default: Checkpointer | None = None


def _on_default(method: Callable[Concatenate[Checkpointer, _P], _T]) -> Callable[_P, _T]:
    """The function that calls a method on the process's Checkpointer."""

    @wraps(MethodType(method, Checkpointer))  # a bound method: help() shows no `self`
    def function(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        return method(current(), *args, **kwargs)

    return function


def _initializing(make: Callable[_P, Checkpointer]) -> Callable[_P, Checkpointer]:
    @wraps(make, (), ())
    def init(*args: _P.args, **kwargs: _P.kwargs) -> Checkpointer:
        """Make the Checkpointer of this process, which the module's functions use. Closes the one before it."""
        global _default
        close()
        _default = make(*args, **kwargs)
        return _default

    init.__doc__ = f"{inspect.cleandoc(init.__doc__ or '')}\n\n{inspect.getdoc(Checkpointer.__init__)}"
    init.__qualname__ = init.__name__
    return init


init = _initializing(Checkpointer)
prepare = _on_default(Checkpointer.prepare)
save_async = _on_default(Checkpointer.save_async)
save = _on_default(Checkpointer.save)
publish = _on_default(Checkpointer.publish)
restore = _on_default(Checkpointer.restore)
restore_in_stages = _on_default(Checkpointer.restore_in_stages)
every = _on_default(Checkpointer.every)
on_preemption = _on_default(Checkpointer.on_preemption)
fits = _on_default(Checkpointer.fits)
latest = _on_default(Checkpointer.latest)


def load(checkpoint: str | int | None = None, names: str = "*") -> dict[str, Any]:
    """Tensors without a model. checkpoint: a step, a tag, or an id; or a URL: store or daemon, a slash, and an id.

    ckpt.load("s3://bucket/ckpts/gpt-small@1000", names="model/*")
    """
    if not isinstance(checkpoint, str) or "@" not in checkpoint:
        return current().load(checkpoint, names)
    with opened(checkpoint) as (source, found):
        return load_tensors(source, found, names)


@contextmanager
def opened(checkpoint: str) -> Iterator[tuple[Source, Checkpoint]]:
    """The checkpoint of an id, or of a URL: store or daemon, a slash, and an id. With its source, until the block ends.

    Raises InvalidName, NoCheckpoint or Unavailable.
    """
    head, _, which = checkpoint.rpartition("@")
    is_url = "://" in head or head.startswith(("/", "."))
    url, _, run = head.rpartition("/") if is_url else ("", "", head)
    with _source(url or None) as source:
        yield source, source.find(Reference.parse(f"{name_of(run)}@{which}" if head else checkpoint))


class Checkpoints(list[Checkpoint]):
    """Checkpoints of a run, newest first, or those that a filter of one's own has left of them. pandas.DataFrame takes
    them; notebooks show a table."""

    def best(self, metric: str, direction: Literal["min", "max"] = "min") -> Checkpoint:
        """The checkpoint with the best value of a metric; abandoned and corrupt ones do not count.

        Raises InvalidRequest, or NoCheckpoint if none has the metric.
        """
        run = self[0].run if self else "?"
        return named(self, Reference(run, name=f"best:{metric}:{direction}"), "this list")

    def _repr_html_(self) -> str:
        columns = ("checkpoint", "state", "stored", "metrics", "tags")
        rows = [(c.id, c.state, human.size(c.stored_bytes), str(c.metrics or ""), " ".join(c.tags)) for c in self]
        return human.html_table([columns, *rows])


def runs() -> list[str]:
    """The names of the runs in the store or daemon of this process's Checkpointer, else of the environment."""
    with _source() as source:
        return source.runs()


def checkpoints(run: str | None = None) -> Checkpoints:
    """The checkpoints of a run, newest first. run: None: the one of this process's Checkpointer, or of the environment.

    Raises InvalidName or Unavailable.
    """
    with _source() as source:
        return Checkpoints(source.checkpoints(check_run(run) if run is not None else current().config.run_name))


def follow(
    run: str | None = None, *, item: str = "model", dtype: str | None = None
) -> Generator[NewWeights, None, None]:
    """The weights of the newest checkpoint of a run, then of each newer one when it is committed; endless.

    A loop that is late gets the newest and skips those between. Each checkpoint has a lease until the next turn of the
    loop. run: None: as for `checkpoints`. item: another model of the checkpoint, such as an average. dtype: "bf16" or
    "fp16" for what is stored as float32. Raises InvalidRequest, Damaged, ObjectMissing or Unavailable.
    """
    from ckpt.following import follow as following  # loads torch

    with _source() as source:
        name = check_run(run) if run is not None else current().config.run_name
        yield from following(source, name, item, dtype)


def delete(
    checkpoint: Checkpoint | str, *, grace_s: float = SWEEP_GRACE_S, reason: str = "", force: bool = False
) -> None:
    """Delete a checkpoint, or the one with an id or a tag: hidden on return, and freed after the grace in seconds.

    Until then `ckptctl undelete` restores it. force: even if it is the newest of its run. Raises NoCheckpoint or
    CheckpointHeld.
    """
    with _source() as source:
        found = source.find(Reference.parse(checkpoint)) if isinstance(checkpoint, str) else checkpoint
        operator = StoreOperator(source.store) if isinstance(source, StoreSource) else cast("DaemonClient", source)
        operator.delete(found, grace_s, reason, force)


@contextmanager
def _source(url: str | None = None) -> Iterator[Source]:
    """The store or daemon at a URL; None: the one of this process's Checkpointer, else of the environment."""
    shared = _default is not None and url is None
    if _default is not None and shared:
        source = _default._source
    else:
        config = Config(url, run="any")  # nothing is saved
        source = open_source(config.source, config.token, config.options, config.retry_s, local=config.local)
    try:
        yield source
    except NoCheckpoint as error:
        suggest_run(error, source)
        raise
    finally:
        if not shared:
            source.close()


def wait(timeout: float | None = None) -> None:
    """As `Checkpointer.wait`; returns at once if this process has none."""
    if _default is not None:
        _default.wait(timeout)


def close(timeout: float | None = None) -> None:
    """As `Checkpointer.close`; returns at once if this process has none."""
    global _default
    checkpointer, _default = _default, None
    if checkpointer is not None:
        checkpointer.close(timeout)


def current() -> Checkpointer:
    """The Checkpointer of this process; makes one from the environment if there is none."""
    return _default if _default is not None else init()
