"""Following a run: the weights of each newest checkpoint, for programs beside the training: evaluation, roll-outs.

for weights in ckpt.follow("gpt", dtype="bf16"):
    weights.load_into(model)
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import nn

from ckpt.capture.parts import part_of
from ckpt.restoring.destinations import Destinations
from ckpt.restoring.resolve import leased, noting_damage
from ckptstore.commits.catalog import Checkpoint
from ckptstore.errors import NoCheckpoint, StateMismatch
from ckptstore.format.boxes import sizes
from ckptstore.reading.source import Source, read_manifest
from ckptstore.reading.weights import Weights, module_name

_LOOK_S = 1.0
_NAMED = 3
_Held = weakref.WeakKeyDictionary[nn.Module, dict[str, str]]
"""The signatures of the tensors that each model holds."""


@dataclass
class NewWeights:
    """The weights of one checkpoint of a run that is followed. For the thread that follows."""

    _source: Source
    checkpoint: Checkpoint
    _view: Weights
    _held: _Held

    def __repr__(self) -> str:
        return f"<weights of {self.checkpoint.id}>"

    def load_into(self, model: nn.Module) -> int:
        """Load what has changed since the last call with this model; returns the number of tensors.

        Everything is read and verified before the first element of the model changes: after an error it has its old
        weights. Values are cast to the model's types. Each rank of a sharded model reads its own part. Raises
        StateMismatch, Damaged or Unavailable.
        """
        self._check(model)
        signatures, known = self._view.signatures(), self._held.get(model, {})
        destinations, copies, loaded = Destinations(self._view.content), [], set[str]()
        for key, tensor in _tensors(model).items():
            name = self._view.aliases.get(key, key)
            if signatures.get(name) == known.get(name, ""):
                continue
            part, entry = part_of(key, tensor), self._view.entries[name]
            dtype, _ = destinations.describe(entry)
            loaded.add(name)
            for piece in part.pieces:
                host = torch.empty(sizes(piece.box), dtype=dtype, device="cpu")
                destinations.fill_box(entry, piece.box, host)
                copies.append((piece.tensor, host))
        with noting_damage(self._source, self.checkpoint):
            destinations.read(self._source, self.checkpoint)
        self._held[model] = {}  # until all is copied
        with torch.no_grad():
            for target, host in copies:
                target.copy_(host)
        self._held[model] = signatures
        return len(loaded)

    def _check(self, model: nn.Module) -> None:
        rows = {name: shape for name, _, shape in self._view.rows()}
        here = {self._view.aliases.get(key, key): tuple(tensor.shape) for key, tensor in _tensors(model).items()}
        wrong = sorted(name for name in here.keys() | rows.keys() if here.get(name) != rows.get(name))
        if wrong:
            listed = "; ".join(f"{n}: {rows.get(n, 'not there')}, here {here.get(n, 'none')}" for n in wrong[:_NAMED])
            raise StateMismatch(
                f"{len(wrong)} tensors of {self.checkpoint.id} do not fit the model: {listed}", "Use the model it has"
            )


def follow(source: Source, run: str, item: str, dtype: str | None) -> Iterator[NewWeights]:
    """The newest checkpoint, then each one that is the newest when the loop asks again, under a lease."""
    held, last = _Held(), ""
    while True:
        with suppress(NoCheckpoint):  # there is none yet, or it is being deleted: a newer one comes
            found = source.latest(run)
            if found.manifest_digest != last:
                with leased(source, found):
                    view = Weights.of(read_manifest(source, found).content, item, dtype)
                    yield NewWeights(source, found, view, held)
                last = found.manifest_digest
                continue
        time.sleep(_LOOK_S)


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {module_name(key): value for key, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
