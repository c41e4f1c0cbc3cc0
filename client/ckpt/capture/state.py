"""Capture: everything one save consists of, from the objects of the training loop. Copies nothing.

While the fingerprint of the state is the same, its description is used again. The fingerprint is made column by column,
in loops that the interpreter does not run: a tenth of the cost of describing each tensor. Equal marks: the same names
for memory of the same layout, shared in the same way.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from msgspec.structs import replace
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ckpt.capture import modules, optimizers
from ckpt.capture.describe import item_frame, optimizer_frame
from ckpt.capture.leaves import Captured, Leaves
from ckpt.capture.ownership import Ownership
from ckpt.capture.parameters import Leaf
from ckpt.capture.parts import is_plain_type
from ckpt.capture.tensors import TensorCollector, dtype_name, small_leaf
from ckpt.capture.train_state import GRADIENTS, MODEL, TrainState
from ckpt.capture.values import capture_values
from ckptstore.codecs.fused import layouts
from ckptstore.errors import InvalidRequest
from ckptstore.format.documents import JSON
from ckptstore.format.shards import Slice
from ckptstore.format.trees import encode_tree, mapping


def _capture_objects(state: TrainState, ownership: Ownership) -> TensorCollector:
    """The state of modules and optimizers."""
    collector = TensorCollector(ownership)
    for item in state.modules:
        owned: dict[str, JSON] = {}
        for leaf in state.leaves(item):
            shape, dtype = getattr(leaf.value, "shape", ()), getattr(leaf.value, "dtype", 0)
            collector.captured.seen.append((leaf.unit, shape, dtype))
            collector.add_state(owned, leaf.name, leaf, leaf.path, leaf.value)
        if owned or ownership.owns(item_frame(item)):
            metadata = encode_tree(state.parameters.metadata[item], item, small_leaf)
            collector.captured.trees[item] = mapping(owned, metadata=metadata)
    for item in state.optimizers:
        _capture_optimizers(collector, item, state)
    return collector


def _capture_optimizers(collector: TensorCollector, item: str, state: TrainState) -> None:
    """Several optimizers of one item are joined: each parameter's state, and all groups."""
    ownership, frame = collector.ownership, optimizer_frame(item, state)
    collector.captured.seen.append(frame)
    owned: dict[str, JSON] = {}
    seen: set[str] = set()
    frames = []
    for optimizer in state.named_optimizers[item]:
        whole = optimizer.state()
        for name, values in whole.pop("state").items():
            if name in seen:
                raise InvalidRequest(
                    f"two optimizers keep state for the parameter {name!r}", "Pass them as a mapping: {name: optimizer}"
                )
            seen.add(name)
            leaf, path = optimizer.leaves.get(name), f"{item}/state/{name}"
            if leaf is not None:
                leaf = replace(leaf, unit=ownership.state_unit(leaf.unit, item))
            collector.add_state(owned, name, leaf or Leaf(item, name, None, unit=frame), path, values)
        collector.captured.replicas.alike |= _held(optimizer, ownership)
        if ownership.owns(frame):
            frames.append(whole)
    if owned or ownership.owns(frame):
        tree = {"state": mapping(owned), "groups": [], **collector.joined(item, frames)}
        collector.captured.trees[item] = mapping(tree)


def _held(optimizer: optimizers.NamedOptimizer, ownership: Ownership) -> dict[str, str]:
    """The parameters that have state, for each set of ranks that should hold the same: if the first of them has no
    state, the state of the others would be lost."""
    held: dict[tuple[int, ...], dict[str, bool]] = defaultdict(dict)
    for name, leaf in optimizer.leaves.items():
        ranks = ownership.holders.get(ownership.state_unit(leaf.unit, optimizer.item), ())
        if len(ranks) > 1 and ownership.rank in ranks:
            held[ranks][name] = bool(optimizer.live_state(leaf))
    return {
        f"{optimizer.item}/state/{min(found)}": f"state of {sum(found.values())} of {len(found)} parameters, "
        + xxhash.xxh3_64_hexdigest(repr(sorted(found.items())).encode())
        for found in held.values()
    }


def _capture_gradients(collector: TensorCollector, state: TrainState) -> None:
    """Gradients of sharded parameters are sharded alike; all others belong to their rank."""
    owned: dict[str, JSON] = {}
    local = {}
    for name, leaf in state.gradients().items():
        path, gradient = f"{GRADIENTS}/{name}", leaf.value.grad
        dtype_name(path, gradient)  # a restore makes new gradients, but cannot make wrappers
        if leaf.part.ranks is None:
            local[name] = gradient
            continue
        collector.add_state(owned, name, leaf, path, gradient)
    if owned:
        collector.captured.trees[GRADIENTS] = mapping(owned)
    collector.add_local(GRADIENTS, local)


_TENSORS = frozenset((nn.Parameter, torch.Tensor, nn.Buffer))
_CONSTANTS = frozenset((type(None), bool, int, float, str))
_MODULE = attrgetter("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set", "_state_dict_hooks")
_METHODS = frozenset(("state_dict", "_save_to_state_dict", "get_extra_state", "named_parameters", "named_modules"))
_NEEDS_GRAD = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_is_custom = cache(lambda kind: any(getattr(kind, name) is not getattr(nn.Module, name) for name in _METHODS))
_DTYPE: Any = torch.Tensor.dtype.__get__  # type: ignore[attr-defined]
_LAYOUT: tuple[Any, ...] = (torch.Tensor.data_ptr, torch.Tensor.shape.__get__, torch.Tensor.stride, _DTYPE)  # type: ignore[attr-defined]
"""The values show where elements lie. No two devices share addresses."""
_EXCHANGE: Any = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
"""Describes tensors to compiled code; torch 2.6 has none."""
_COMPLEX = 1 << 5
"""The bit of complex numbers among the kinds of types: kDLComplex."""


def _ids(objects: Collection[object]) -> npt.NDArray[np.int64]:
    return np.fromiter(map(id, objects), np.int64, len(objects))


@cache
def exchange() -> int:
    """The address of torch's DLPackExchangeAPI; 0: it has none."""
    address: Any = ctypes.pythonapi.PyCapsule_GetPointer
    address.restype, address.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    return (_EXCHANGE and address(_EXCHANGE, b"dlpack_exchange_api")) or 0


class StateFingerprint:
    """The marks of a state, which hold no tensor, and the tensors they were made of."""

    def __init__(self, state: TrainState) -> None:
        self.marks: list[object] = [*state.modules, *state.optimizers]
        self.tensors: list[torch.Tensor] = []
        self.complete = all(map(self._add_module, chain(*state.modules.values())))
        self.complete &= all(map(self._add_optimizer, chain(*state.optimizers.values())))
        """False if an object produces its state by code of its own, which has to run at every save."""
        self.locals = self.tensors
        if not set(map(type, self.tensors)) <= _TENSORS:
            self.locals = [one.to_local() if isinstance(one, DTensor) else one for one in self.tensors]
            sharded = [one for one in self.tensors if isinstance(one, DTensor)]
            self.marks.append([(one.shape, one.device_mesh, one.placements) for one in sharded])
            self.complete &= all(map(is_plain_type, sharded))  # wrappers have no address
        self.marks.append(_ids(self.tensors).tobytes())
        try:
            self._add_layouts()
        except (RuntimeError, BufferError):  # a sparse tensor has neither an address nor strides
            self.complete = False

    def _add_layouts(self) -> None:
        """The memory of each tensor, and how its elements lie there."""
        if exchange() and (found := layouts(exchange(), _ids(self.locals))) is not None:
            self.marks.append(found[0])
            is_complex = found[1] & _COMPLEX
        else:
            self.marks += [list(map(mark, self.locals)) for mark in _LAYOUT]
            is_complex = any(dtype.is_complex for dtype in set(map(_DTYPE, self.locals)))
        self.marks.append(list(map(torch.Tensor.is_neg, self.locals)))  # also of real parts of complex numbers
        if is_complex:
            self.marks.append(list(map(torch.Tensor.is_conj, self.locals)))

    def _add_module(self, chunk: nn.Module) -> bool:
        found = [modules.unwrap(chunk)]
        for module in found:
            found += [child for child in module._modules.values() if child is not None]
        children, parameters, buffers, hidden, hooks = zip(*map(_MODULE, found), strict=True)
        below = _ids(list(chain.from_iterable(held.values() for held in children))).tobytes()
        names = list(map(len, children)), list(chain.from_iterable(children))
        root = type(found[0]) is not nn.ModuleDict and id(found[0])  # a mapping of models is a new one at each call
        self.marks += [root, below, names, [(n, frozenset(held)) for n, held in enumerate(hidden) if held]]
        own = any(map(_is_custom, set(map(type, found))))
        # The hooks of fully_shard reshard parameters, which has been done.
        own |= any(hooks) or any(one._state_dict_pre_hooks for one in found if not isinstance(one, FSDPModule))
        own |= any(not one.__dict__.keys().isdisjoint(_METHODS) for one in found)
        first = len(self.tensors)
        added = not own and self._add(parameters) and self._add(buffers)
        self.marks.append(list(map(_NEEDS_GRAD, self.tensors[first:])))  # of optimizer state it says nothing
        return added

    def _add_optimizer(self, optimizer: Optimizer) -> bool:
        for group in optimizer.param_groups:
            names = list(group.get("param_names") or ())
            self.marks += [_ids(group["params"]).tobytes(), names, bool(group.get("capturable"))]
        self.marks += [id(optimizer), _ids(optimizer.state).tobytes()]
        own = type(optimizer).state_dict is not Optimizer.state_dict or optimizers.state_holder(optimizer) != optimizer
        own |= bool(optimizer._optimizer_state_dict_pre_hooks or optimizer._optimizer_state_dict_post_hooks)
        return not own and set(map(type, optimizer.state.values())) <= {dict} and self._add(optimizer.state.values())

    def _add(self, named: Collection[Mapping[str, Any]]) -> bool:
        values = list(chain.from_iterable(held.values() for held in named))
        kinds = list(map(type, values))
        self.marks += [list(map(len, named)), list(chain.from_iterable(named)), kinds]
        if not all(kind in _TENSORS or kind in _CONSTANTS or issubclass(kind, DTensor) for kind in set(kinds)):
            return False
        self.marks.append([repr(value) for value in values if type(value) in _CONSTANTS])  # zeros have signs
        self.tensors += [value for value in values if type(value) not in _CONSTANTS]
        return True


class _Description(NamedTuple):
    """A capture without its tensors."""

    marks: list[object]
    captured: Captured
    numbers: list[int]
    """By leaf: the number of its tensor."""
    views: dict[int, tuple[Any, ...]]
    """By number of a leaf that is a part of its tensor: size, stride and offset."""
    collector: TensorCollector
    copies: list[Sequence[tuple[str, int]]]
    """The copies of the collector, with numbers of tensors."""
    groups: dict[str, list[list[list[str]]]]
    """Names of parameters by item, optimizer and group, where this rank writes the groups."""


_COMPARED = 8  # copies


class Capturer:
    """Captures one run's saves. Used by the training thread."""

    _last: _Description | None = None
    _captures = 0
    _same: object = None

    @torch.no_grad()
    def capture(self, state: TrainState, ownership: Ownership, grads: bool) -> Captured:
        """Name every leaf of the state, and what of it this rank writes.

        grads: also capture the gradients, for a save in the middle of an accumulation window; they differ between
        ranks, except those of sharded parameters. Raises UnsupportedObject for what cannot be stored, or LayoutChanged.
        """
        state.reshard()
        self._captures += 1
        if grads:  # they come and go
            collector = _capture_objects(state, ownership)
            _capture_gradients(collector, state)
            collector.add_digests(*self._turn(*collector.copies))
            return capture_values(collector, state)
        made, last = StateFingerprint(state), self._last
        copies: list[Any]
        if last is not None and last.collector.ownership is ownership and made.complete and made.marks == last.marks:
            collector, captured = last.collector, _again(last, state, made)
            copies = [[(path, made.tensors[n]) for path, n in found] for found in self._turn(*last.copies)]
        else:
            collector = _capture_objects(state, ownership)
            captured, copies = collector.captured, self._turn(*collector.copies)
            last = self._last = _describe(state, made, collector) if made.complete else None
        first = len(captured.leaves)
        values = collector.fork(captured)
        values.add_digests(*copies)
        capture_values(values, state)
        # Files lie where they lay. Where a tensor lies does not say all about it.
        added = [
            object() if isinstance(one, torch.Tensor) else one.data_ptr() for one in captured.leaves.tensors[first:]
        ]
        if (key := (last, captured.leaves.slices[first:], added)) != self._same:
            self._same = key
        captured.sameness = last and self._same
        return captured

    def _turn(self, alike: Sequence[Any], others: Sequence[Any]) -> list[Sequence[Any]]:
        """The copies that a save compares: some of the others, not the same each time, but the same on all ranks."""
        every = max(1, len(others) // _COMPARED)
        return [alike, others[self._captures % every :: every]]


@torch.no_grad()
def weights_alone(captured: Captured, state: TrainState) -> Captured:
    """The same with float32 parameters of the model rounded to bfloat16, and nothing of this rank only."""
    named = {leaf.path for leaf in state.parameters.by_name[MODEL].values()}
    leaves = captured.leaves
    for number, piece in enumerate(leaves.slices):
        if piece.dtype == "float32" and piece.entry in named:
            leaves.slices[number] = Slice(piece.entry, "bfloat16", piece.shape, piece.box)
            leaves.tensors[number] = leaves.tensors[number].to(torch.bfloat16)
    leaves.origins = leaves.tensors
    captured.sameness = None  # they are in other memory each time
    captured.late.append(captured.local.clear)
    return captured


def _describe(state: TrainState, made: StateFingerprint, collector: TensorCollector) -> _Description | None:
    captured, leaves = collector.captured, collector.captured.leaves
    number_of = {id(tensor): i for i, tensor in enumerate(made.tensors)}
    if not {id(one) for one in (*leaves.origins, *(one for _, one in chain(*collector.copies)))} <= number_of.keys():
        return None  # a leaf is not part of the fingerprint
    numbers = [number_of[id(origin)] for origin in leaves.origins]
    views = {
        leaf: (one.shape, one.stride(), one.storage_offset())
        for leaf, (n, one) in enumerate(zip(numbers, leaves.tensors, strict=True))
        if not one.is_set_to(made.locals[n])
    }
    groups = {
        item: [one.names for one in named]
        for item, named in state.named_optimizers.items()
        if collector.ownership.owns(optimizer_frame(item, state))
    }
    columns = Leaves(list(leaves.slices), changes=list(leaves.changes))
    copies: list[Any] = [[(path, number_of[id(tensor)]) for path, tensor in found] for found in collector.copies]
    return _Description(made.marks, captured.copy(columns), numbers, views, collector.fork(Captured()), copies, groups)


def _again(last: _Description, state: TrainState, made: StateFingerprint) -> Captured:
    leaves = last.captured.leaves
    tensors, origins = (list(map(held.__getitem__, last.numbers)) for held in (made.locals, made.tensors))
    for leaf, view in last.views.items():
        tensors[leaf] = tensors[leaf].as_strided(*view)
    leaves = Leaves(list(leaves.slices), tensors, origins, list(leaves.changes))  # values are added
    captured = last.captured.copy(leaves)
    trees = captured.trees
    collector = last.collector.fork(captured)
    for item, names in last.groups.items():
        each = zip(state.optimizers[item], names, strict=True)
        groups = [{"groups": optimizers.describe_groups(optimizer, held)} for optimizer, held in each]
        trees[item] = {**trees[item], **collector.joined(item, groups)}
    return captured
