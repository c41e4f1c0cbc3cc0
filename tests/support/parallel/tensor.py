"""Layouts in which matrices are divided by columns and rows: tensor parallel, alone and with data parallel."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from tests.support.parallel.built import Built, Setup, average_gradients, data_parallel, optimizers
from tests.support.parallel.model import Transformer
from tests.support.parallel.sharded import shard


class Replicated(ParallelStyle):
    """Parameters become DTensors that every rank has whole: what training frameworks do with norms."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> tuple[DTensor, ...]:
            return tuple(DTensor.from_local(x, mesh, (Replicate(),), run_check=False) for x in inputs)

        def leave(_: nn.Module, output: DTensor, mesh: DeviceMesh) -> torch.Tensor:
            return output.to_local()

        return distribute_module(module, device_mesh, None, enter, leave)  # type: ignore[arg-type]


def tp(setup: Setup) -> Built:
    """Tensor parallel over all ranks, which all see the whole batch."""
    model = parallelize(setup, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    return data_parallel(setup, model, optimizers(setup, [model]))


def ddp_tp(setup: Setup) -> Built:
    """Tensor parallel in pairs, and the pairs are plain replicas."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize(setup, mesh["tp"])
    replicas = mesh["dp"]
    return data_parallel(
        setup,
        model,
        optimizers(setup, [model]),
        replicas.get_local_rank(),
        replicas.size(),
        replicas.get_group(),
        reduce=lambda: average_gradients(model.parameters(), replicas.size(), replicas.get_group()),
    )


def tp_fsdp2(setup: Setup) -> Built:
    """Tensor parallel in pairs, then sharded over the pairs: strided shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize(setup, mesh["tp"])
    shards = mesh["dp"]
    shard(model, shards)
    return data_parallel(
        setup,
        model,
        optimizers(setup, [model]),
        shards.get_local_rank(),
        shards.size(),
        shards.get_group(),
        reduce=lambda: average_gradients([model.scale], shards.size(), shards.get_group()),
    )


def parallelize(setup: Setup, mesh: DeviceMesh) -> Transformer:
    """Matrices by columns or rows; some norms replicated as DTensors, some plain tensors that every rank has."""
    model = setup.model()
    plan: dict[str, ParallelStyle] = {
        "tok": RowwiseParallel(input_layouts=Replicate()),
        "blocks.*.attn.q": ColwiseParallel(),
        "blocks.*.attn.k": ColwiseParallel(),
        "blocks.*.attn.v": ColwiseParallel(),
        "blocks.*.attn.o": RowwiseParallel(),
        "blocks.*.norm2": Replicated(),
        # An uneven activation must stay a DTensor: from a local tensor its size would be guessed wrong.
        "blocks.*.mlp.up": ColwiseParallel(use_local_output=False),
        "blocks.*.mlp.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallel = cast(Transformer, parallelize_module(model, mesh, plan))
    if setup.shape.tied:
        parallel.tie()
    return parallel
