"""The bytes that each rank writes and reads under data, tensor, pipeline and expert parallelism. Pure.

The rules are those of saves: of equal copies the first is written, each rank that writes has one shard file, and
distributed state is written by the ranks that hold it (docs/decisions/0010). The work is assumed to be even: real
pipeline stages differ by their embeddings.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from ckptplan.model import Model, Term
from ckptstore.errors import InvalidRequest
from ckptstore.values import Record


class Sharding(StrEnum):
    """The state that the data-parallel ranks distribute among them."""

    DDP = "ddp"
    """Nothing: every rank has a copy."""
    ZERO1 = "zero1"
    """Optimizer state."""
    ZERO2 = "zero2"
    """Optimizer state and gradients."""
    ZERO3 = "zero3"
    """Everything, as fsdp."""
    FSDP = "fsdp"
    """Everything."""


class Layout(Record):
    """The degrees of parallelism. World size: dp · tp · pp; experts are distributed within dp."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    sharding: Sharding = Sharding.DDP
    replicas: int = 1
    """Copies of the sharded state within dp (hybrid sharding)."""
    split_replicas: bool = False
    """All replicas share the writing of replicated state."""
    processes: int = 8
    """Ranks per node."""

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "ep", "replicas", "processes"):
            if getattr(self, name) < 1:
                raise InvalidRequest(f"{name} {getattr(self, name)} is not positive", "Give at least 1")
        for name in ("ep", "replicas"):
            if self.dp % getattr(self, name):
                raise InvalidRequest(f"dp {self.dp} is not a multiple of {name} {getattr(self, name)}", "Change one")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp * self.model_parallel

    @property
    def model_parallel(self) -> int:
        """Ranks that hold one copy of the model without sharding and experts."""
        return self.tp * self.pp

    @property
    def nodes(self) -> int:
        """Number of nodes, rounded up."""
        return -(-self.world_size // self.processes)

    def distributes(self, term: Term) -> bool:
        """Whether the data-parallel ranks distribute a term."""
        if self.sharding in (Sharding.ZERO3, Sharding.FSDP):
            return True
        if term.name == "grads":
            return self.sharding is Sharding.ZERO2
        return self.sharding is not Sharding.DDP and term.name != "weights"


class Writers(Record):
    """Ranks that write the same share of something."""

    what: str
    ranks: int
    """The number of ranks."""
    which: str
    bytes_per_rank: float
    """Raw bytes."""


def writers(model: Model, terms: Sequence[Term], layout: Layout) -> list[Writers]:
    """Who writes what. The bytes of all add up to the checkpoint."""
    found = []
    mp, dp = layout.model_parallel, layout.dp
    dense = model.parameters - model.expert_parameters
    for term in terms:
        size = term.bytes_per_parameter
        if not size:
            continue
        shared = layout.distributes(term)
        sharders = dp // layout.replicas if shared and not layout.split_replicas else dp
        if shared or layout.split_replicas:
            which = "every rank" if sharders == dp else f"the first {sharders} of {dp} data-parallel ranks"
            found.append(_writers(term.name, mp * sharders, which, model.parameters * size))
            continue
        found.append(_writers(term.name, mp, "data-parallel rank 0", dense * size))
        if model.expert_parameters:
            which = f"data-parallel ranks 0 to {layout.ep - 1}" if layout.ep > 1 else "data-parallel rank 0"
            found.append(_writers(f"{term.name} of experts", mp * layout.ep, which, model.expert_parameters * size))
    return found


def _writers(what: str, ranks: int, which: str, total: float) -> Writers:
    return Writers(what=what, ranks=ranks, which=which, bytes_per_rank=total / ranks)


def rank_bytes(found: Sequence[Writers]) -> float:
    """Raw bytes of the rank that writes the most. Rank 0 is in every group."""
    return sum(group.bytes_per_rank for group in found)


def num_files(found: Sequence[Writers]) -> int:
    """Shard files: one for each rank that writes."""
    return max((group.ranks for group in found), default=0)


def bytes_read(model: Model, terms: Sequence[Term], layout: Layout) -> float:
    """Raw bytes that all ranks together read on a restore if each reads what it needs for itself."""
    dense = model.parameters - model.expert_parameters
    total = 0.0
    for term in terms:
        if layout.distributes(term):
            total += layout.replicas * model.parameters * term.bytes_per_parameter
        else:
            copies = layout.dp * dense + layout.dp // layout.ep * model.expert_parameters
            total += copies * term.bytes_per_parameter
    return total
