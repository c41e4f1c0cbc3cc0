"""Layouts in which parameters are divided: FSDP2, HSDP, FSDP1, and tensor parallel, alone and with data parallel."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from tests.support.parallel.built import Built, Setup, average_gradients, data_parallel, optimizers
from tests.support.parallel.model import Block, Transformer


def fsdp2(setup: Setup) -> Built:
    model = setup.model()
    shard(model)
    return _data_parallel(setup, model, model.scale)


def fsdp2_checkpointed(setup: Setup) -> Built:
    """As fsdp2, and attention is computed again in backward: its wrapper stands in the middle of names."""
    model = setup.model()
    for block in model.blocks.values():
        cast(Block, block).attn = checkpoint_wrapper(cast(Block, block).attn)  # type: ignore[assignment]
    shard(model)
    return _data_parallel(setup, model, model.scale)


def hsdp(setup: Setup) -> Built:
    """fully_shard on two dimensions: sharded in pairs, and the pairs are replicas."""
    model = setup.model()
    shard(model, init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard")))
    return _data_parallel(setup, model, model.scale)


def fsdp1(setup: Setup) -> Built:
    return _fsdp1(setup, ShardingStrategy.FULL_SHARD, originals=True)


def fsdp1_grad(setup: Setup) -> Built:
    """FullyShardedDataParallel that keeps parameters whole between forward and backward."""
    return _fsdp1(setup, ShardingStrategy.SHARD_GRAD_OP, originals=True)


def fsdp1_flat(setup: Setup) -> Built:
    """FullyShardedDataParallel with one flat parameter per wrapped module."""
    return _fsdp1(setup, ShardingStrategy.FULL_SHARD, originals=False)


def shard(model: Transformer, mesh: DeviceMesh | None = None) -> None:
    """Each block, then the root. Scalars cannot be sharded: that one stays a plain tensor on every rank."""
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params={model.scale})


def _data_parallel(setup: Setup, model: nn.Module, whole: nn.Parameter) -> Built:
    """Every rank is data parallel; `whole` is the parameter that the wrapper leaves alone."""
    world = dist.get_world_size()
    return data_parallel(
        setup, model, optimizers(setup, [model]), dist.get_rank(), world,
        reduce=lambda: average_gradients([whole], world),
    )  # fmt: skip


def _fsdp1(setup: Setup, strategy: ShardingStrategy, originals: bool) -> Built:
    """A flat parameter is trained whole or not at all: then the frozen one must stay outside."""
    assert not setup.two_optimizers, "torch gathers no optimizer that has only some of the parameters"
    model = setup.model()
    options: dict[str, Any] = {
        "device_id": torch.device("cpu"), "use_orig_params": originals, "sharding_strategy": strategy,
    }  # fmt: skip
    for name, block in model.blocks.items():
        model.blocks[name] = FullyShardedDataParallel(block, **options)
    ignored = [model.scale] if originals else [model.scale, model.position]
    return _data_parallel(setup, FullyShardedDataParallel(model, ignored_states=ignored, **options), model.scale)


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
    model, replicas = parallelize(setup, mesh["tp"]), mesh["dp"]
    return data_parallel(
        setup, model, optimizers(setup, [model]), replicas.get_local_rank(), replicas.size(), replicas.get_group(),
        reduce=lambda: average_gradients(model.parameters(), replicas.size(), replicas.get_group()),
    )  # fmt: skip


def tp_fsdp2(setup: Setup) -> Built:
    """Tensor parallel in pairs, then sharded over the pairs: strided shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, shards = parallelize(setup, mesh["tp"]), mesh["dp"]
    shard(model, shards)
    return data_parallel(
        setup, model, optimizers(setup, [model]), shards.get_local_rank(), shards.size(), shards.get_group(),
        reduce=lambda: average_gradients([model.scale], shards.size(), shards.get_group()),
    )  # fmt: skip


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
