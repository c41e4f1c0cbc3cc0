"""The module functions: one Checkpointer for the process, made by `init` or, from the environment, by first use."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import closing
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from ckpt.checkpointer import Checkpointer
from ckpt.restoring.tensors import load_tensors
from ckptapi.opening import open_source
from ckptstore.names import Reference

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Method = Callable[Concatenate[Checkpointer, _P], _T]

_default: Checkpointer | None = None


def _explained_by(method: _Method[_P, _T]) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Gives a function the signature and the text of a method. Its own text, if any, is appended."""

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        texts = [inspect.cleandoc(text) for text in (method.__doc__, function.__doc__) if text]
        explained = wraps(method, ("__name__", "__annotations__"))(function)
        signature = inspect.signature(method)
        parameters = list(signature.parameters.values())[1:]
        explained.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        explained.__doc__, explained.__qualname__ = "\n\n".join(texts), method.__name__
        return function

    return decorate


def _on_default(method: _Method[_P, _T]) -> Callable[_P, _T]:
    """The function that calls a method on the process's Checkpointer."""

    def function(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        return method(current(), *args, **kwargs)

    return _explained_by(method)(function)


def _initializing(make: Callable[_P, Checkpointer]) -> Callable[_P, Checkpointer]:
    def init(*args: _P.args, **kwargs: _P.kwargs) -> Checkpointer:
        """Make the Checkpointer of this process, which the module's functions use. Closes the one before it."""
        global _default
        close()
        _default = make(*args, **kwargs)
        return _default

    init.__signature__ = inspect.signature(make).replace(return_annotation=Checkpointer)  # type: ignore[attr-defined]
    init.__doc__ = f"{inspect.cleandoc(init.__doc__ or '')}\n\n{inspect.getdoc(Checkpointer.__init__)}"
    init.__qualname__ = init.__name__
    return init


init = _initializing(Checkpointer)
prepare = _on_default(Checkpointer.prepare)
save_async = _on_default(Checkpointer.save_async)
save = _on_default(Checkpointer.save)
restore = _on_default(Checkpointer.restore)
restoring = _on_default(Checkpointer.restoring)
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


@_explained_by(Checkpointer.wait)
def wait(timeout: float | None = None) -> None:
    """Returns at once if this process has no Checkpointer."""
    if _default is not None:
        _default.wait(timeout)


@_explained_by(Checkpointer.close)
def close(timeout: float | None = None) -> None:
    """Returns at once if this process has no Checkpointer."""
    global _default
    checkpointer, _default = _default, None
    if checkpointer is not None:
        checkpointer.close(timeout)


def current() -> Checkpointer:
    """The Checkpointer of this process; makes one from the environment if there is none."""
    return _default if _default is not None else init()
