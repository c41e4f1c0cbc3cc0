"""The contents of a save: leaves for the shard, which alias live memory until they are staged, and trees.

Small tensors of GPUs, such as those in trees, are copied to the host without a wait: `tensor.cpu()` and `tensor.item()`
wait until the GPU has done everything that was queued, a step or more.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from msgspec import Struct, field

from ckpt.device import DEVICES, Mark, has_device, poll
from ckpt.lazily import torch
from ckptstore.format.documents import JSON, Replicas
from ckptstore.format.shards import Slice


class Number(Struct):
    """A number that lies on a GPU, as a tensor of one element."""

    tensor: torch.Tensor


class SmallReads(Struct):
    """The reads of one save. The training thread begins them; any thread finishes them."""

    _begun: list[tuple[Mark, torch.Tensor]] = []
    """The end of each read, and its tensor, which is kept until then."""

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Host memory that has the elements of a tensor after `finish`. The tensor may change at once."""
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
        if not has_device(tensor):
            return plain.cpu()
        device = DEVICES[tensor.device.type](tensor.device)
        try:
            host = device.pinned(plain.nbytes)
        except RuntimeError:  # no memory can be pinned
            return plain.cpu()
        to = host.view(plain.dtype).view(plain.shape)
        device.copy([to], [plain], side=False)
        self._begun.append((device.mark(side=False), plain))
        return to

    def finish(self, expired: Callable[[], bool] | None = None) -> bool:
        """Wait until all reads are complete. False if time has expired before."""
        if not all(poll(mark.done, expired) for mark, _ in self._begun):
            return False
        self._begun = []
        return True


class Change(Enum):
    """When the memory of a leaf may change, as far as its role in the training loop shows."""

    ANY_TIME = 0
    """Buffers, gradients, averages, whatever a caller passed."""
    STEP = 1
    """Parameters that an optimizer updates, and its state: they change in `optim.step()`."""
    NEVER = 2
    """Frozen parameters, unless the caller changes them by other means."""


class Leaves(Struct):
    """Leaves, column by column: every save looks at all of them, and should neither make nor touch an object for each
    that it can do without."""

    slices: list[Slice] = []
    """The part of an entry that each one is."""
    tensors: list[torch.Tensor] = []
    """To be staged."""
    origins: list[torch.Tensor] = []
    """The live tensors of the training loop, of which these are all or a part."""
    changes: list[Change] = []

    def __len__(self) -> int:
        return len(self.slices)

    @property
    def gpu(self) -> torch.device | None:
        """One that some of them live on; None if there is none."""
        return next((tensor.device for tensor in self.tensors if tensor.is_cuda), None)

    def append(self, piece: Slice, tensor: torch.Tensor, origin: torch.Tensor, change: Change) -> None:
        """One more."""
        self.slices.append(piece)
        self.tensors.append(tensor)
        self.origins.append(origin)
        self.changes.append(change)


class Captured(Struct):
    """The data that one rank saves: leaves for its shard, trees for its receipt."""

    leaves: Leaves = field(default_factory=Leaves)
    trees: dict[str, JSON] = {}
    local: dict[str, JSON] = {}
    reads: SmallReads = field(default_factory=SmallReads)
    late: list[Callable[[], object]] = []
    """Completes `local`, and tensors of trees that are still being read from a GPU."""
    aliases: dict[str, str] = {}
    seen: list[object] = []
    """The leaves and optimizers that this rank holds, also what another rank writes. Another layout has others."""
    replicas: Replicas = field(default_factory=Replicas)
    sameness: object | None = None
    """If two captures have the same object here, their leaves are the same slices and lie in the same memory."""

    def copy(self, leaves: Leaves) -> Captured:
        """The same with other leaves, and nothing that is late."""
        trees, aliases, alike = dict(self.trees), dict(self.aliases), dict(self.replicas.alike)
        return Captured(leaves, trees, aliases=aliases, seen=self.seen, replicas=Replicas(alike))

    def write(self) -> dict[str, JSON]:
        """All of `local`. Completes `trees`. Of any thread: what need not be done while training waits is done now."""
        self.reads.finish()
        for complete in self.late:
            complete()
        self.late = []
        return self.local
