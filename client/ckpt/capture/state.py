"""Capture: everything one save consists of, from the objects of the training loop. Copies nothing."""

from __future__ import annotations

import torch

from ckpt.capture import optimizers
from ckpt.capture.describe import item_frame, optimizer_frame
from ckpt.capture.leaves import Captured
from ckpt.capture.ownership import Ownership
from ckpt.capture.parameters import Leaf
from ckpt.capture.tensors import TensorCollector, dtype_name
from ckpt.capture.train_state import GRADIENTS, TrainState
from ckpt.capture.values import capture_values
from ckptstore.errors import InvalidRequest
from ckptstore.format.documents import JSON
from ckptstore.format.trees import mapping


@torch.no_grad()
def capture(state: TrainState, ownership: Ownership, grads: bool) -> Captured:
    """Name every leaf of the state, and what of it this rank writes.

    grads: also capture the gradients, for a save in the middle of an accumulation window; they differ between ranks,
    except those of sharded parameters. Raises UnsupportedObject for what cannot be stored, or LayoutChanged.
    """
    state.reshard()
    collector = capture_objects(state, ownership)
    if grads:
        _capture_gradients(collector, state)
    capture_values(collector, state)
    return collector.captured


def capture_objects(state: TrainState, ownership: Ownership) -> TensorCollector:
    """The state of modules and optimizers."""
    collector = TensorCollector(ownership)
    for item in state.modules:
        _capture_module(collector, item, state)
    for item in state.optimizers:
        _capture_optimizers(collector, item, state)
    return collector


def _capture_module(collector: TensorCollector, item: str, state: TrainState) -> None:
    ownership = collector.ownership
    owned: dict[str, JSON] = {}
    for leaf in state.leaves(item):
        tree = collector.shared(leaf, leaf.path, leaf.value)
        if ownership.owns(leaf.unit):
            owned[leaf.name] = tree
    if owned or ownership.owns(item_frame(item)):
        collector.captured.trees[item] = mapping(owned)


def _capture_optimizers(collector: TensorCollector, item: str, state: TrainState) -> None:
    """Several optimizers of one item are joined: each parameter's state, and all groups."""
    ownership, frame = collector.ownership, optimizer_frame(item, state)
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
                optimizers.check_sharded_alike(path, leaf.value, values)
            leaf = leaf or Leaf(item, name, None, unit=frame)
            tree = collector.shared(leaf, path, values)
            if ownership.owns(leaf.unit):
                owned[name] = tree
        if ownership.owns(frame):
            frames.append(whole)
    if owned or ownership.owns(frame):
        tree = {"state": mapping(owned), "groups": [], **collector.joined(item, frames)}
        collector.captured.trees[item] = mapping(tree)


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
        tree = collector.shared(leaf, path, gradient)
        if collector.ownership.owns(leaf.unit):
            owned[name] = tree
    if owned:
        collector.captured.trees[GRADIENTS] = mapping(owned)
    collector.add_local(GRADIENTS, local)
