"""PEFT: a checkpoint with adapters is also the folder that `PeftModel.from_pretrained` loads.

    model = get_peft_model(base, LoraConfig(...))
    ckpt.init("s3://bucket/ckpts", run="tuned", assets=adapter_files(model))
    ckpt.restore(model, optim)

    ckptctl export tuned --to adapter --format peft

The integrations of transformers, Lightning and Accelerate pass these files by themselves. A frozen base is stored once
per run; with `adapters_alone(model)` in place of the model it is not stored at all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from torch import nn

from ckptstore.reading.assets import NAMES


def adapter_files(model: nn.Module, prefix: str = "") -> dict[str, bytes]:
    """The configuration of each adapter, and the names of its tensors in a file of PEFT's; for `assets=`.

    model: a PeftModel, or a model of transformers after `add_adapter`. prefix: of its names in a module around it. The
    adapter `default` is at the top of the folder, others in folders of their names, as PEFT has it. Raises ValueError
    for an adapter that PEFT computes when it writes (prompts of an encoder with layers).
    """
    names: dict[str, tuple[str, int, list[int]]] = {}
    with TemporaryDirectory() as folder:
        for adapter, tensors in _tensors(model).items():
            place = "" if adapter == "default" else f"{adapter}/"
            names |= {place + name: (prefix + here, 0, shape) for name, here, shape in tensors}
            config = copy(_configurations(model)[adapter])
            config.inference_mode = True
            config.save_pretrained(f"{folder}/{place}")
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in Path(folder).rglob("*.json")}
    return {**files, NAMES: json.dumps(names).encode()}


def adapters_alone(model: nn.Module) -> nn.Module:
    """A module of the modules with the tensors of adapters, under their names: to save and restore without the base.

    The base is then what the program loads; an adapter's configuration names it (`base_model_name_or_path`,
    `revision`). Raises ValueError as `adapter_files`.
    """
    root = nn.Module()
    for name in sorted({here.rpartition(".")[0] for tensors in _tensors(model).values() for _, here, _ in tensors}):
        *above, last = name.split(".")
        place = root
        for part in above:
            if part not in place._modules:
                place.add_module(part, nn.Module())
            place = place.get_submodule(part)
        place.add_module(last, model.get_submodule(name))
    return root


def _configurations(model: Any) -> Mapping[str, Any]:
    found: Mapping[str, Any] = model.peft_config
    return found


def _tensors(model: nn.Module) -> dict[str, list[tuple[str, str, list[int]]]]:
    """The tensors of each adapter: name in the file, name in the model, shape."""
    state = model.state_dict(keep_vars=True)
    names = {id(one): name for name, one in state.items()}
    outer = "" if isinstance(model, PeftModel) else "base_model.model."

    def here(adapter: str, name: str, tensor: torch.Tensor) -> str:
        # A prompt is computed from its parameter, and has the same values.
        equal = (n for n, one in state.items() if one.shape == tensor.shape and torch.equal(one.cpu(), tensor.cpu()))
        if (found := names.get(id(tensor)) or next(equal, None)) is None:
            raise ValueError(f"{name} of the adapter {adapter!r} is not a tensor of the model")
        return found

    return {
        adapter: [
            (outer + name, here(adapter, name, one), list(one.shape))
            for name, one in get_peft_model_state_dict(model, state, adapter).items()
        ]
        for adapter in _configurations(model)
    }
