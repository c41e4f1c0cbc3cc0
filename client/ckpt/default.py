"""The module functions: one Checkpointer for the process, made by `init` or, from the environment, by first use."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import closing
from functools import wraps
from types import MethodType
from typing import Any, Concatenate, ParamSpec, TypeVar

from ckpt.checkpointer import Checkpointer
from ckpt.restoring.pipeline import load_tensors
from ckptapi.opening import open_source
from ckptstore.names import Reference

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
restore = _on_default(Checkpointer.restore)
restore_in_stages = _on_default(Checkpointer.restore_in_stages)
every = _on_default(Checkpointer.every)
on_preemption = _on_default(Checkpointer.on_preemption)
fits = _on_default(Checkpointer.fits)
latest = _on_default(Checkpointer.latest)


def load(checkpoint: str | int | None = None, names: str = "*") -> dict[str, Any]:
    """Tensors without a model. checkpoint: a step or id, or a URL: store or daemon, a slash, and an id.

    ckpt.load("s3://bucket/ckpts/gpt-small@1000", names="model/*")
    """
    if isinstance(checkpoint, str) and "/" in checkpoint:
        url, _, reference = checkpoint.rpartition("/")
        with closing(open_source(url)) as source:
            return load_tensors(source, source.find(Reference.parse(reference)), names)
    return current().load(checkpoint, names)


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
