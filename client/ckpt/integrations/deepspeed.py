"""DeepSpeed: the state of an engine with ZeRO 1, 2 or 3, under the names and in the shapes of its model.

    engine, *_ = deepspeed.initialize(model=model, config=config)
    restored = restore(engine, loader=loader)
    for batch in loader:
        ...
        engine.step()
        save_async(engine, engine.global_steps, loader=loader)

The item `model` has the float32 masters, from which each rank makes its parameters of lower precision again. Each rank
writes its part of them, and a checkpoint restores into any stage, number of ranks, FSDP2 or a plain model. The
functions use the process's Checkpointer: `ckpt.init`, or CKPT_STORE and CKPT_RUN.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine
from torch.distributed import get_process_group_ranks, get_rank

from ckpt import default
from ckpt.capture.modules import PARTS
from ckpt.capture.parameters import Pack, Parameters
from ckpt.capture.parts import FlatRange
from ckpt.restoring.pipeline import Restored
from ckpt.snapshot.handle import SaveHandle
from ckptstore.errors import InvalidRequest, UnsupportedObject

_COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
_GROUPS = {
    "DeepSpeedZeroOptimizer": "bit16_groups",
    "BF16_Optimizer": "bf16_groups",
    "DeepSpeedZeroOptimizer_Stage3": "fp16_groups",
}
"""By class of the engine's optimizer: where it has the parameters of each flat one."""


def save_async(engine: DeepSpeedEngine, step: int, **extras: Any) -> SaveHandle:
    """Save the engine in the background: masters, optimizer, counters, scheduler and loss scaler. Call it on all ranks,
    from the training thread, after `engine.step()`.

    extras: such as a resumable loader, and `metrics=`, as for `ckpt.save_async`. Raises InvalidRequest within a window
    of gradient accumulation, UnsupportedObject for an engine that is not supported, and what `ckpt.save_async` raises.
    """
    window = engine.gradient_accumulation_steps()
    if done := engine.micro_steps % window:
        raise InvalidRequest(
            f"{done} of {window} micro-batches of an accumulation window are done, and only DeepSpeed's buffers have "
            "their gradients",
            "Save when engine.micro_steps is a multiple of engine.gradient_accumulation_steps()",
        )
    trainer = {name: getattr(engine, name) for name in _COUNTERS}
    scheduler, scaler = engine.lr_scheduler, getattr(engine.optimizer, "loss_scaler", None)
    trainer |= {"lr_scheduler": scheduler and scheduler.state_dict(), "loss_scaler": scaler and dict(vars(scaler))}
    with _parts(engine) as optimizer:
        return default.save_async(engine.module, optimizer, step, shared={"trainer": trainer}, **extras)


def restore(
    engine: DeepSpeedEngine, checkpoint: str | int | None = None, strict: bool = True, **extras: Any
) -> Restored | None:
    """Restore the newest checkpoint of the run, or the named one; None if the run has none. Call it on all ranks,
    before the first iteration, with the extras that are saved.

    The checkpoint may be of another stage or number of ranks, of FSDP2 or a plain model; one that has no counters and
    scheduler leaves the engine's. Buffers and frozen parameters get the engine's type. Raises
    UnsupportedObject, and what `ckpt.restore` raises.
    """
    stages = default.restore_in_stages(checkpoint=checkpoint, strict=strict, cast=True)
    with _parts(engine) as optimizer:
        restored = stages.model(engine.module)
        if restored is None:
            return None
        stages.optimizers(optimizer)
    _make_parameters(engine.optimizer)
    if "trainer" in restored.unused:
        extras["trainer"] = None
    if extras and (restored := stages.extras(**extras)) and "trainer" in extras:
        saved = restored.values["trainer"]
        for name in _COUNTERS:
            setattr(engine, name, saved.get(name, 0))
        if engine.lr_scheduler and saved["lr_scheduler"]:
            engine.lr_scheduler.load_state_dict(saved["lr_scheduler"])
        if getattr(engine.optimizer, "dynamic_loss_scale", False):
            vars(engine.optimizer.loss_scaler).update(saved.get("loss_scaler") or {})
    stages.rng()
    return restored


@contextmanager
def _parts(engine: DeepSpeedEngine) -> Iterator[Any]:
    """Let the module stand for this rank's parts of the masters, and yield the optimizer that updates them."""
    zero, known = engine.optimizer, Parameters()
    _check(engine, type(zero).__name__)
    for parameter in engine.module.parameters():
        if hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping"):
            part, layout = _part(zero, parameter)
            known.parts[id(parameter)], known.layouts[id(part)] = part, layout
    if partitioned := engine.zero_optimization_partition_weights():
        zero._set_fp32_optimizer_param_groups()  # they are empty but for a step
    flats = [flat for group in zero.optimizer.param_groups for flat in group["params"]]
    for flat, held in zip(flats, getattr(zero, _GROUPS[type(zero).__name__]), strict=True):
        views = {str(i): known.parts[id(parameter)] for i, parameter in enumerate(held)}
        known.packs.update(dict.fromkeys(map(id, (flat, *views.values())), Pack(flat, flat.detach(), views)))
    setattr(engine.module, PARTS, known)
    try:
        yield zero.optimizer
    finally:
        delattr(engine.module, PARTS)
        if partitioned:
            zero._clear_fp32_optimizer_param_groups()


def _part(zero: Any, parameter: Any) -> tuple[Any, FlatRange]:
    """The part of a master that this rank has. ZeRO 3 cuts each parameter into equal shares, the last ones padded; in
    ZeRO 1 and 2 the partitions of a group of parameters end anywhere."""
    if hasattr(parameter, "ds_id"):
        group, shape, size = parameter.ds_process_group, parameter.ds_shape, parameter.partition_numel()
        start = min(get_rank(group) * size, parameter.ds_numel)
        count = min(size, parameter.ds_numel - start)
        trains = parameter.requires_grad
        part = zero._get_fp32_opt_state_partition(parameter, False)[0] if trains else parameter.ds_tensor
    else:
        group, shape, found = parameter._dp_group, parameter.shape, parameter._hp_mapping
        start, count, part = 0, 0, zero.optimizer.param_groups[0]["params"][0]
        if found is not None:
            at, part = found.lp_fragment_address, found.hp_fragment
            start, count = at.start, at.numel
    return part.detach()[:count], FlatRange(tuple(shape), start, start + count, tuple(get_process_group_ranks(group)))


def _make_parameters(zero: Any) -> None:
    """Make the parameters of lower precision from the masters, as a step does. A collective."""
    if hasattr(zero, "update_lp_params"):
        zero.update_lp_params()
        zero._hp_optimizer_states_linked = False
        return
    zero._partition_all_parameters()
    for i in range(len(zero.fp16_groups)):
        zero._reassign_or_swap_out_partitioned_parameters(i)
    if held := zero.persistent_parameters:
        held[0].all_gather(held)


def _check(engine: DeepSpeedEngine, zero: str) -> None:
    """zero: the class of the engine's optimizer. Raises UnsupportedObject."""
    in_parts = getattr(engine.optimizer, "params_in_nvme_and_cpu", False)
    refused = {
        "a pipeline engine": engine.pipeline_parallelism,
        "tensor parallelism": engine.mp_world_size > 1,
        "experts (MoE)": engine.has_moe_layers,
        "ZeRO++ (hpZ)": engine.zero_hpz_partition_size() > 1,
        "ZeRO++ (quantization)": engine.zero_quantized_weights() or engine.zero_quantized_gradients(),
        "offload to NVMe": in_parts or engine.zero_nvme_offload_optimizer(),
        f"{zero} in place of ZeRO 1, 2 or 3": zero not in _GROUPS or not engine.zero_optimization_stage(),
    }
    if found := [what for what, uses in refused.items() if uses]:
        raise UnsupportedObject(
            f"the engine uses {found[0]}, which is not supported",
            "Take it out of the configuration, or save this run with engine.save_checkpoint. Without ZeRO, pass "
            "engine.module and its optimizer to ckpt.save_async",
        )
