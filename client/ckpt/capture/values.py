"""Values: what a save keeps beside modules and optimizers. Extras of one rank, shared ones, and random state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ckpt.capture.arrays import is_distributed, is_template
from ckpt.capture.assets import read_files
from ckpt.capture.collector import INLINE_BYTES, Collector
from ckpt.capture.leaves import Captured, Number, SmallReads
from ckpt.capture.rng import rng_state
from ckpt.capture.train_state import RNG, Stateful, TrainState
from ckpt.device import has_device
from ckpt.lazily import torch, torch_loaded
from ckptstore.format.documents import JSON
from ckptstore.format.trees import encode_tree, with_records
from ckptstore.reading.assets import ASSETS


def capture_values(collector: Collector, state: TrainState) -> Captured:
    """Add random state, the extras of this rank and the shared ones. Returns all that the collector has.

    Raises UnsupportedObject for what cannot be stored.
    """
    collector.add_unchanging(RNG, rng_state())
    for item, value in state.others.items():
        if (numbers := scaler_state(value, collector.captured.reads)) is not None:
            collector.add_unchanging(item, numbers)
        else:
            collector.add_local(item, value.state_dict() if isinstance(value, Stateful) else value)
    names, rank = sorted(state.shared), collector.ownership.rank
    if state.assets is not None:
        names.append(ASSETS)
        files = {} if rank else read_files(state.assets)
        arrays = {name: np.frombuffer(data, np.uint8) for name, data in files.items()}
        collector.add_shared(ASSETS, arrays, INLINE_BYTES)
    if names or not rank:
        collector.captured.replicas.alike["shared="] = ", ".join(names)
    for item, value in state.shared.items():
        collector.add_shared(item, value.state_dict() if isinstance(value, Stateful) else value)
    return collector.captured


def check_others(state: TrainState, rank: int = 0) -> int:
    """The bytes that tensors and arrays of plain data take in this rank's snapshots, about. Copies nothing.

    Objects with a state_dict are not asked for it: they are known from the first save on. Raises UnsupportedObject for
    plain data that cannot be saved.
    """
    own, shared = _sizes(state.others), _sizes(state.shared)
    return sum(size for size in own if size > INLINE_BYTES) + (sum(shared) if rank == 0 else 0)


def _sizes(values: Mapping[str, Any]) -> list[int]:
    """Bytes of each tensor and whole array in those that are plain."""
    kind, sizes = Collector, list[int]()
    if torch_loaded():
        from ckpt.capture.tensors import TensorCollector

        kind = TensorCollector

    def check(path: str, value: Any) -> JSON:
        size = kind.num_bytes(path, value)
        sizes.append(0 if is_distributed(value) else size)
        return None if size or is_template(value) else kind.small(path, value)

    for item, value in values.items():
        if not isinstance(value, Stateful):
            encode_tree(value, item, with_records(check))
    return sizes


def scaler_state(value: object, reads: SmallReads) -> dict[str, Any] | None:
    """The state_dict of a GradScaler whose scale is on a GPU, with that as `Number`. None for other objects."""
    if not torch_loaded():
        return None
    GradScaler = torch.amp.grad_scaler.GradScaler  # noqa: N806
    if not isinstance(value, GradScaler) or type(value).state_dict is not GradScaler.state_dict:
        return None
    if not value.is_enabled() or value._scale is None or value._growth_tracker is None or not has_device(value._scale):
        return None
    scale, tracker = value._get_scale_async(), value._growth_tracker
    assert scale is not None
    return {
        "scale": Number(reads.read(scale)),
        "growth_factor": value.get_growth_factor(),
        "backoff_factor": value.get_backoff_factor(),
        "growth_interval": value.get_growth_interval(),
        "_growth_tracker": Number(reads.read(tracker)),
    }
