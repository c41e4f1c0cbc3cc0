"""Reads folders of trainers: DeepSpeed's checkpoints of ZeRO, its universal ones, and those of Accelerate.

ZeRO 1 and 2 lay the parameters of a group one after the other, and cut the whole into equal partitions; ZeRO 3 cuts
each parameter into equal shares (deepspeed/utils/zero_to_fp32.py). No code in a file is executed; tensors are read when
they are needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, chain
from math import prod
from pathlib import Path
from typing import Any

from ckpt.capture.train_state import MODEL, OPTIMIZER
from ckpt.foreign.archive import StridedTensor
from ckpt.foreign.inert import Budget, LeftOut
from ckpt.foreign.parts import ForeignState
from ckpt.foreign.state import Scattered, read_file, to_foreign
from ckptstore.errors import CorruptObject, UnsupportedObject
from ckptstore.format.boxes import whole

_MOST = 1 << 30
_FILE = re.compile(r"(?:(?:bf16_)?zero_pp_rank_(\d+)_)?mp_rank_00_(model|optim)_states\.pt")
_PARAMETERS = {
    "module", "buffer_names", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params",
}  # fmt: skip
_ACCELERATE = {
    "pytorch_model.bin": MODEL, "optimizer.bin": OPTIMIZER, "optimizer.pt": OPTIMIZER, "scheduler.bin": "scheduler",
    "scheduler.pt": "scheduler", "scaler.pt": "scaler",
}  # fmt: skip

_Flat = Sequence[StridedTensor]
_Shapes = Sequence[Mapping[str, tuple[int, ...]]]
"""The shapes of the parameters of each group."""


def read_deepspeed(path: Path, item: str) -> ForeignState:
    """The state in a folder of DeepSpeed. The float32 masters are the item model, and what is no parameter the item
    trainer: counters, the scheduler, and what the user added.

    Raises UnsupportedObject for tensor and pipeline parallelism and experts, CorruptObject if files are missing.
    """
    if (path / "latest").is_file():
        path /= (path / "latest").read_text().strip()
    budget = Budget(str(path), _MOST)
    read = partial(read_file, budget=budget)
    files: dict[str, dict[int, Path]] = {"model": {}, "optim": {}}
    for file in path.glob("*.pt"):
        if not (match := _FILE.fullmatch(file.name)):
            raise UnsupportedObject(
                f"{file} is of tensor or pipeline parallelism, or of experts", "Restore it in DeepSpeed, and save there"
            )
        files[match[2]][int(match[1] or 0)] = file
    models, optims = ([read(of_rank[rank]) for rank in sorted(of_rank)] for of_rank in files.values())
    shapes = models[0]["param_shapes"]
    if (path / "zero").is_dir():
        zero = read(path / "zero/optimizer_state.pt")
        model, state, groups = _universal(path / "zero", shapes, read, zero)
    else:
        ranks = [optim["optimizer_state_dict"] for optim in optims]
        zero = ranks[0] if ranks else {}
        wanted = zero.get("partition_count", 1)
        if len(ranks) != (max(wanted) if isinstance(wanted, list) else wanted):
            raise CorruptObject(f"{path} has not the files of all {wanted} ranks", "Copy the folder again")
        model, state, groups = _zero(path, shapes, ranks)
    model = {**_fixed(path, models), **model}
    model |= {name: model[other] for name, other in models[0]["shared_params"].items()}
    groups = [dict(group, params=list(own)) for group, own in zip(groups, shapes, strict=True)]
    trainer = {key: value for key, value in models[0].items() if key not in _PARAMETERS}
    if isinstance(scaler := zero.get("loss_scaler"), LeftOut):  # its attributes are numbers
        trainer["loss_scaler"] = next((dict(part) for part in scaler.parts if isinstance(part, dict)), None)
    items = {MODEL: model, OPTIMIZER: {"state": state, "param_groups": groups}, "trainer": trainer}
    return to_foreign(items, item, str(path), budget)


def read_accelerate(path: Path, item: str) -> ForeignState:
    """The state in the files of torch in a folder of Accelerate, or of transformers' Trainer. Raises as read_torch."""
    budget = Budget(str(path), _MOST)
    state = {key: read_file(path / name, budget) for name, key in _ACCELERATE.items() if (path / name).is_file()}
    return to_foreign(state, item, str(path), budget)


def _zero(
    path: Path, shapes: _Shapes, ranks: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]], Any]:
    """Masters, their optimizer's state, and its groups."""
    shared = "fp32_flat_groups" in ranks[0]
    masters, base = ("fp32_flat_groups", "optimizer_state_dict") if shared else (
        "single_partition_of_fp32_groups", "base_optimizer_state",
    )  # fmt: skip
    paddings = ranks[0].get("param_alignment_paddings") or [[0] * len(group) for group in shapes]

    def by_name(flat: Sequence[_Flat]) -> dict[str, Scattered]:
        """flat: the tensors of each rank; with ZeRO 1 and 2, one for each group."""
        found, at = {}, 0
        for i, group in enumerate(shapes):
            at = at if shared else 0
            for padding, (name, shape) in zip(paddings[i], group.items(), strict=True):
                if shared:
                    found[name] = _from_shares(path, shape, [list(_cut(of_rank, at)) for of_rank in flat])
                    at += -(-prod(shape) // len(flat))
                else:
                    found[name] = _joined(path, shape, list(_cut([of_rank[i] for of_rank in flat], at, prod(shape))))
                    at += prod(shape) + padding
        return found

    optims = [rank[base] for rank in ranks]
    if not all("state" in optim for optim in optims):
        raise UnsupportedObject(f"{path} has the optimizer of an elastic checkpoint", "Save without elastic_checkpoint")
    states = [list(optim["state"].values()) for optim in optims]
    found: dict[str, dict[str, Any]] = {name: {} for group in shapes for name in group}
    for key, one in (states[0][0] if states[0] else {}).items():
        if isinstance(one, StridedTensor) and one.shape:
            values: Mapping[str, Any] = by_name([[group[key] for group in of_rank] for of_rank in states])
        else:  # the number of steps
            values = dict.fromkeys(found, one)
        for name, value in values.items():
            found[name][key] = value
    return dict(by_name([rank[masters] for rank in ranks])), found, optims[0]["param_groups"]


def _universal(
    path: Path, shapes: _Shapes, read: Callable[[Path], Any], zero: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]], Any]:
    """The same of a folder in which each parameter, and its state, is a file."""
    model, state = dict[str, Any](), dict[str, dict[str, Any]]()
    steps = zero.get("optimizer_state_dict", {}).get("state", {})  # of ZeRO 3; others have files
    for name, shape in chain.from_iterable(group.items() for group in shapes):
        values = {file.stem: read(file) for file in (path / name).glob("*.pt")}
        flat = {key: one["param"] if isinstance(one, dict) else one for key, one in values.items()}
        state[name] = {
            key: _joined(path / name, shape, [one]) if key != "step" and isinstance(one, StridedTensor) else one
            for key, one in flat.items()
        }
        if "fp32" not in flat:
            raise CorruptObject(f"{path / name} has no fp32.pt", "Copy the folder again")
        model[name] = state[name].pop("fp32")
        if state[name] and steps:
            state[name].setdefault("step", next(iter(steps.values()))["step"])
    return model, state, zero["param_groups"]


def _fixed(path: Path, models: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Buffers, and parameters that are not trained, of which with ZeRO 3 each rank has a share. Parameters that are
    trained are in the module with lower precision."""
    found: dict[str, Any] = {
        name: one for name, one in models[0]["module"].items() if isinstance(one, StridedTensor) and one.nbytes
    }
    for name, shape in (models[0]["frozen_param_shapes"] or {}).items():
        found[name] = _from_shares(path, shape, [[model["frozen_param_fragments"][name]] for model in models])
    return found


def _from_shares(path: Path, shape: tuple[int, ...], shares: Sequence[_Flat]) -> Scattered:
    """A tensor that is cut into equal shares, which these tensors begin with; the last ones are padded."""
    size, count = -(-prod(shape) // len(shares)), prod(shape)
    parts = (_cut(share, 0, max(0, min(size, count - rank * size))) for rank, share in enumerate(shares))
    return _joined(path, shape, list(chain.from_iterable(parts)))


def _cut(tensors: _Flat, at: int, count: int = 1 << 62) -> Iterator[StridedTensor]:
    """These elements of tensors that follow one another."""
    for tensor in tensors:
        size = prod(tensor.shape)
        low, high = max(at, 0), min(at + count, size)
        if low < high:
            yield StridedTensor(tensor.storage, tensor.dtype, (high - low,), (1,), tensor.offset + low)
        at -= size


def _joined(path: Path, shape: tuple[int, ...], parts: _Flat) -> Scattered:
    """A tensor of the elements of all parts, one after the other. Raises CorruptObject."""
    if sum(prod(part.shape) for part in parts) != prod(shape):
        raise CorruptObject(f"{path} has not all elements of a parameter", "Copy the folder again, with all files")
    pieces = [(part.reader(), end - part.nbytes, end) for part, end in zip(
        parts, accumulate(part.nbytes for part in parts), strict=True,
    )]  # fmt: skip

    def read(start: int, buffer: memoryview) -> None:
        for read_part, begin, end in pieces:
            low, high = max(start, begin), min(start + len(buffer), end)
            if low < high:
                read_part(low - begin, buffer[low - start : high - start])

    return Scattered(parts[0].dtype, tuple(shape), ((whole(shape), read),))
