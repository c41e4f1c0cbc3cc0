"""vLLM: its workers read the weights of training checkpoints, when they start and while they serve.

    vllm serve FOLDER --load-format ckptd --model-loader-extra-config '{"checkpoint": "gpt@1000"}'

FOLDER holds the configuration and the tokenizer. With `--weight-transfer-config '{"backend": "ckptd"}'` a running
server takes another checkpoint: `update_weights` with {"checkpoint": "gpt@1100"} reads into host memory what has
changed, and verifies it, on every worker; `finish_weight_update` puts it into the model. So the model has old weights
or new ones, never a mixture: if the second step fails, the worker ends.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn
from vllm.distributed import get_world_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
    layerwise_groups,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.models.utils import is_pp_missing_parameter
from vllm.platforms import current_platform

from ckpt.default import opened
from ckpt.dtypes import BY_NAME
from ckpt.restoring.resolve import leased, noting_damage
from ckptstore.commits.catalog import Checkpoint
from ckptstore.errors import InvalidRequest, RestoreFailed
from ckptstore.reading.assets import open_weights
from ckptstore.reading.source import Source, read_manifest
from ckptstore.reading.weights import Weights, module_name

NAME = "ckptd"
_BATCH_BYTES = 256 << 20
"""Most bytes that a starting worker holds beside the model, unless one tensor is larger."""
_ADAPTER = re.compile(r"\.(lora_\w+|modules_to_save)\.")
_AROUND = re.compile(r"^base_model\.model\.|\.(base_layer|original_module)(?=\.)")
"""Parts that PEFT adds to the names of a model."""


def register() -> None:
    """The entry point: vLLM calls it once in each of its processes."""
    register_model_loader(NAME)(CkptdModelLoader)
    WeightTransferEngineFactory.register_engine(NAME, CkptdWeightTransferEngine)


@dataclass(frozen=True, slots=True)
class _Held:
    """The tensors of a worker's model."""

    shapes: dict[str, tuple[int, ...]]
    signatures: dict[str, str]
    """Digests of those that it certainly has; the others are read again."""


_held: WeakKeyDictionary[nn.Module, _Held] = WeakKeyDictionary()


class CkptdModelLoader(DefaultModelLoader):
    """The load format `ckptd`. A worker reads only its experts, if vLLM knows them, and its pipeline stage."""

    def __init__(self, load_config: Any) -> None:
        options = dict(load_config.model_loader_extra_config)
        self._checkpoint = options.pop("checkpoint", None)
        if not isinstance(self._checkpoint, str):
            raise InvalidRequest(
                "the load format ckptd needs a checkpoint",
                """Pass --model-loader-extra-config '{"checkpoint": "RUN@STEP"}'""",
            )
        super().__init__(replace(load_config, model_loader_extra_config=options))

    def download_model(self, model_config: Any) -> None:
        """Nothing: the weights are read from where they are."""

    def get_all_weights(self, model_config: Any, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors by the names of the module, each verified. Raises CkptError."""
        with _reading(self._checkpoint) as (source, checkpoint, weights):
            shapes = _shapes(weights)
            _held[model] = _Held(shapes, {})
            mine = [name for name in shapes if not should_skip_weight(name, self.local_expert_ids)]
            yield from _tensors(source, checkpoint, weights, mine, model)
            _held[model] = _Held(shapes, weights.signatures())


@dataclass
class CkptdInitInfo(WeightTransferInitInfo):
    """Nothing is agreed with a trainer."""


@dataclass
class CkptdUpdateInfo(WeightTransferUpdateInfo):
    """Which weights to take."""

    checkpoint: str


class CkptdWeightTransferEngine(WeightTransferEngine[CkptdInitInfo, CkptdUpdateInfo]):
    """The weight transfer `ckptd`: a worker pulls its weights; no trainer takes part."""

    init_info_cls = CkptdInitInfo
    update_info_cls = CkptdUpdateInfo
    supports_draft_weight_update = False
    _read: tuple[_Held, list[tuple[str, torch.Tensor]]] | None = None

    def init_transfer_engine(self, init_info: CkptdInitInfo) -> None:
        """Nothing to prepare."""

    def start_weight_update(self) -> None:
        """Forget an update that was not finished."""
        self._read = None

    def receive_weights(self, update_info: CkptdUpdateInfo) -> None:
        """Read and verify what differs from the weights in the model, which does not change.

        Raises the same kinds of errors as a restore, and RestoreFailed if another worker could not read it.
        """
        self._read, problem = None, None
        try:
            self._read = self._changed(update_info.checkpoint)
        except BaseException as error:
            problem = error  # the others wait for this worker's answer
        if not _all(problem is None):
            self._read = None
            raise problem or RestoreFailed("another worker could not read the weights: all keep what they have")

    def _changed(self, name: str) -> tuple[_Held, list[tuple[str, torch.Tensor]]]:
        held = _held.get(self.model)
        if held is None:
            raise InvalidRequest("this server's weights are of no checkpoint", "Start it with --load-format ckptd")
        with _reading(name) as (source, checkpoint, weights):
            new = _Held(_shapes(weights), weights.signatures())
            if new.shapes != held.shapes:
                differing = sorted(name for name, _ in new.shapes.items() ^ held.shapes.items())
                raise InvalidRequest(
                    f"{checkpoint.id} has other tensors than the weights being served, for example {differing[0]!r}",
                    "Start a server with it",
                )
            # vLLM loads a layer as a whole.
            groups = layerwise_groups(list(new.shapes))
            changed = {name for name, digest in new.signatures.items() if held.signatures.get(name) != digest}
            names = [name for group in groups if not changed.isdisjoint(group) for name in group]
            return new, list(_tensors(source, checkpoint, weights, names, self.model))

    def finish_weight_update(self) -> None:
        """Put what was read into the model. Ends the process if that fails: some layers may be new, and others old."""
        read, self._read = self._read, None
        if read is None or not read[1]:
            return
        new, tensors = read
        try:
            _held[self.model] = _Held(new.shapes, {})
            with _repacking(self.model):
                initialize_layerwise_reload(self.model)
                self.model.load_weights(tensors)
                finalize_layerwise_reload(self.model, self.model_config)
            _held[self.model] = new
        except BaseException as error:
            raise SystemExit(f"the weights of a worker are a mixture, so it ends: {error!r}") from error

    def shutdown(self) -> None:
        """Free what was read."""
        self._read = None


@contextmanager
def _repacking(model: nn.Module) -> Iterator[None]:
    """On CPUs vLLM packs experts only once, and a tied head only when it is loaded itself: let it pack them again."""
    methods = [(module, module.quant_method) for module in model.modules() if hasattr(module, "quant_method")]
    experts = [one for _, one in methods if isinstance(one, UnquantizedFusedMoEMethod) and current_platform.is_cpu()]
    kernels = [(one, one.moe_kernel) for one in experts]
    for one in experts:
        one.moe_kernel = None
    yield
    for one, kernel in kernels:
        one.moe_kernel = one.moe_kernel or kernel  # the kernel of a layer that was not loaded
    for module, one in methods:
        if isinstance(one, UnquantizedEmbeddingMethod):
            one.process_weights_after_loading(module)


def _all(done: bool) -> bool:
    """Whether all workers have done their part. A collective."""
    group = get_world_group()
    answer = torch.tensor(int(done))
    if group.world_size > 1:
        torch.distributed.all_reduce(answer, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return bool(answer)


@contextmanager
def _reading(name: str) -> Iterator[tuple[Source, Checkpoint, Weights]]:
    with opened(name) as (source, checkpoint), leased(source, checkpoint), noting_damage(source, checkpoint):
        weights = open_weights(source, checkpoint)
        if any(map(_ADAPTER.search, weights.entries)):
            weights = _base(Weights.of(read_manifest(source, checkpoint).content, naming=_base_name), checkpoint)
        yield source, checkpoint, weights


def _base_name(name: str) -> str:
    return _AROUND.sub("", module_name(name))


def _base(weights: Weights, checkpoint: Checkpoint) -> Weights:
    """The model that adapters are on top of: vLLM loads these by itself."""
    entries = {name: entry for name, entry in weights.entries.items() if not _ADAPTER.search(name)}
    if not entries:
        raise InvalidRequest(f"{checkpoint.id} has adapters without their base", "Load the base, and them by LoRA")
    return replace(weights, entries=entries)


def _shapes(weights: Weights) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, _, shape in weights.rows()}


def _tensors(
    source: Source, checkpoint: Checkpoint, weights: Weights, names: Iterable[str], model: nn.Module
) -> Iterator[tuple[str, torch.Tensor]]:
    """Read some tensors in batches; none is yielded before it is verified. Not those of other pipeline stages."""
    chosen = {name: weights.entries[name] for name in names if not is_pp_missing_parameter(name, model)}
    for file in replace(weights, entries=chosen).files(_BATCH_BYTES).values():
        data = np.empty(file.bytes, np.uint8)
        file.read(source, checkpoint, 0, data.data)
        for tensor in file.tensors:
            flat = torch.from_numpy(data[tensor.at : tensor.at + tensor.bytes])
            yield tensor.name, flat.view(BY_NAME[tensor.dtype]).reshape(tensor.shape)
