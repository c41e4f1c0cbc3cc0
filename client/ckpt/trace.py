"""Trace: what a trainer that `ckptctl rehearse` has started records of itself, and where it dies.

An event is a save, a restore, the begin of a data loader, a call of the model, or a step of an optimizer. Its key
counts the calls and steps of training since the newest save or restore, so that it names the same moment in a run that
was not killed and in one that was. The first of them comes with digests of all that the program holds. Nothing that
training computes is changed.
"""

from __future__ import annotations

import os
import signal
import sys
import sysconfig
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

import msgspec
import numpy as np
import xxhash

from ckpt.capture.rng import rng_state
from ckpt.capture.train_state import Stateful, TrainState
from ckpt.host.rehearsal import Event, Plan
from ckpt.lazily import is_tensor, torch, torch_loaded
from ckptstore.format.decoding import decode_json
from ckptstore.format.trees import children, value_leaves
from ckptstore.stores import REHEARSAL

_LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), os.path.dirname(__file__), "<frozen")
_DEPTH, _ELEMENTS = 9, 1000
_OPAQUE = (type, ModuleType, FunctionType, MethodType)


class Trace:
    """The trace of this process."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._plan = folder, decode_json((folder / "plan").read_bytes(), Plan)
        self._step, self._count, self._num_saves, self._stepped = -1, 0, 0, True
        self._model: Any = None
        self._objects: dict[str, Any] = {}
        if torch_loaded():
            self._observe()

    def reached(self, kind: str, step: int, state: TrainState, wait: Callable[[], None]) -> None:
        """A save has begun ("saved"), or training goes on from what was restored ("restored")."""
        self._step, self._count = step, 0
        others = {name: one for name, one in state.others.items() if isinstance(one, Stateful)}
        self._objects = {"weights": state.modules, "optimizer": state.optimizers, "extras": others}
        self._record(kind)
        if kind == "saved":
            self._num_saves += 1
            if self._num_saves == self._plan.num_saves or 0 < self._plan.last <= step:
                wait()
                os._exit(0)

    def _observe(self) -> None:
        from torch.nn.modules.module import register_module_forward_pre_hook
        from torch.optim.optimizer import register_optimizer_step_pre_hook
        from torch.utils.data import DataLoader

        register_module_forward_pre_hook(self._called)
        register_optimizer_step_pre_hook(self._stepping)
        begin = DataLoader.__iter__

        def begins(loader: DataLoader[Any]) -> Any:
            self._record("loader")
            return begin(loader)

        DataLoader.__iter__ = begins  # type: ignore[method-assign]

    def _called(self, module: Any, arguments: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self._model is None and module.training and any(one.requires_grad for one in module.parameters()):
            self._model = module  # no other one calls the first
        if module is self._model and module.training:
            named = sys._getframe(1).f_locals.get("kwargs")  # which a hook of all modules does not get
            self._train("forward" if self._stepped else "window", {"batch": (arguments, named)})
        elif module is self._model:
            self._record("validation")

    def _stepping(self, optimizer: Any, *_: Any) -> None:
        self._train("step", {"gradients": [one.grad for group in optimizer.param_groups for one in group["params"]]})

    def _train(self, kind: str, values: dict[str, Any]) -> None:
        self._count, self._stepped = self._count + 1, kind == "step"
        values["random"] = rng_state()
        if self._count == 1:
            values |= {**self._objects, "variables": _variables()}
        self._record(kind, values)

    def _record(self, kind: str, values: Any = None) -> None:
        rank = int(os.environ.get("RANK", "0"))
        event = Event(self._step, self._count, kind, rank, time.monotonic(), _digests(values) if values else {})
        with open(self._folder / f"{self._plan.life}-{os.getpid()}.trace", "ab") as file:
            file.write(msgspec.json.encode(event) + b"\n")
        if (rank, event.key) == (self._plan.rank, self._plan.key):
            (self._folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)


def _variables() -> dict[str, Any]:
    """Variables of the functions that run, and of their modules, but not of libraries."""
    found, frame = dict[str, Any](), sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if not frame.f_code.co_filename.startswith(_LIBRARIES):
            found = {**frame.f_globals, **frame.f_locals, **found}
    return {name: value for name, value in found.items() if not name.startswith("__")}


def _digests(values: dict[str, Any]) -> dict[str, str]:
    """Digests by path, of tensors, arrays and plain data."""
    from ckpt.capture.tensors import digest

    found = dict[str, str]()
    for path, leaf in value_leaves(_plain(values, set(), _DEPTH), ""):
        with suppress(NotImplementedError, RuntimeError, TypeError, ValueError):  # tensors without elements in memory
            if is_tensor(leaf):
                found[path[1:]] = digest(getattr(leaf, "_local_tensor", leaf))
            elif isinstance(leaf, (int, float, str, bytes, np.ndarray)):
                raw = leaf.tobytes() if isinstance(leaf, np.ndarray) else repr(leaf).encode()
                found[path[1:]] = xxhash.xxh3_64_hexdigest(raw)
    return found


def _plain(value: Any, seen: set[int], depth: int) -> Any:
    """A value as containers of leaves. Objects that were seen, or lie too deep, are left out."""
    is_object = hasattr(value, "__dict__") and not isinstance(value, dict) and not is_tensor(value)
    library = type(value).__module__.partition(".")[0]
    if not depth or (is_object and (id(value) in seen or isinstance(value, _OPAQUE) or library == "ckpt")):
        return None
    if is_object:
        seen.add(id(value))
    if torch_loaded() and isinstance(value, torch.nn.Module):
        # Ranks may hold other buffers until a wrapper makes them alike; checkpoints have them.
        value, is_object = {"state_dict": dict(value.named_parameters())}, False
    elif torch_loaded() and isinstance(value, torch.optim.Optimizer):
        value, is_object = {"state_dict": value.state_dict()}, False
    elif library in ("torch", "numpy", "random"):
        for read in ("get_state", "getstate"):
            if hasattr(value, read):
                return {"generator": getattr(value, read)()}
        if isinstance(value, np.random.Generator):
            return {"generator": value.bit_generator.state}
    within = children(vars(value) if is_object else value)
    return value if within is None else {key: _plain(one, seen, depth - 1) for key, one in within[:_ELEMENTS]}


@cache
def trace_of_process() -> Trace | None:
    """The trace, if this process is rehearsed."""
    return Trace(Path(os.environ[REHEARSAL])) if REHEARSAL in os.environ else None
