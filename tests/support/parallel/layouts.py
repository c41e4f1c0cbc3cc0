"""The layouts by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.support.parallel import pipeline, replicated, sharded
from tests.support.parallel.built import Built, Setup


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to train the model: on `world_size` ranks, built by this function inside the process group."""

    name: str
    world_size: int
    build: Callable[[Setup], Built]


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("single", 1, replicated.single), Layout("model_parallel", 1, pipeline.model_parallel),
        Layout("ddp", 2, replicated.ddp), Layout("zero", 2, replicated.zero),
        Layout("zero_by_hand", 2, replicated.zero_by_hand), Layout("ep", 2, replicated.expert_parallel),
        Layout("fsdp2", 2, sharded.fsdp2), Layout("fsdp2_4", 4, sharded.fsdp2),
        Layout("fsdp2_checkpointed", 2, sharded.fsdp2_checkpointed), Layout("fsdp1", 2, sharded.fsdp1),
        Layout("fsdp1_grad", 2, sharded.fsdp1_grad), Layout("fsdp1_flat", 2, sharded.fsdp1_flat),
        Layout("hsdp", 4, sharded.hsdp), Layout("tp", 2, sharded.tp), Layout("ddp_tp", 4, sharded.ddp_tp),
        Layout("tp_fsdp2", 4, sharded.tp_fsdp2), Layout("pp", 2, pipeline.pp),
        Layout("pp_interleaved", 2, pipeline.pp_interleaved),
    )
}  # fmt: skip
