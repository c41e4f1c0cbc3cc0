from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load
from torch import nn

from ckpt import Checkpointer
from ckptstore.reading.assets import folder_files, open_weights
from ckptstore.reading.source import StoreSource
from ckptstore.stores import open_store
from tests.ckpt.integrations.proof import Integration, operators_can_use, private_names_exist
from tests.support.command_line import invoke, succeed

TORCHTITAN = Integration(
    "tests.ckpt.integrations.train_torchtitan",
    (
        "torchtitan.components.checkpointer", "torchtitan.components.dataloader", "torchtitan.components.optimizer",
        "ckpt.integrations.torchtitan", "tests.ckpt.integrations.proof", "torch._dynamo",
    ),
)  # fmt: skip


def test_a_run_killed_in_mid_epoch_resumes_exactly(tmp_path: Path) -> None:
    TORCHTITAN.resumes_exactly(tmp_path, "llama", 10, resumed_at=9)
    operators_can_use(tmp_path, "llama", tmp_path / "llama-0.pt")


def test_two_ranks_with_fully_shard(tmp_path: Path) -> None:
    TORCHTITAN.resumes_exactly(tmp_path, "llama", 10, resumed_at=9, ranks=2)
    operators_can_use(tmp_path, "llama", tmp_path / "llama-0.pt")


def test_the_newest_are_kept(tmp_path: Path) -> None:
    TORCHTITAN.outputs(tmp_path, "llama", 0, "keep=2", "wait")
    assert [one["step"] for one in invoke("ls", "llama", "--store", tmp_path, "-o", "json").json] == [20, 18]


def test_names_that_are_not_public() -> None:
    private_names_exist("torchtitan", TORCHTITAN)


@pytest.mark.parametrize("name", ["last_save_in_hf", "initial_load_in_hf"])
def test_what_the_manager_does_not_do_is_refused(name: str) -> None:
    from ckpt.integrations.torchtitan import CkptdManager
    from ckptstore.errors import InvalidRequest

    options: dict[str, Any] = {name: True}
    with pytest.raises(InvalidRequest, match=name):
        CkptdManager.Config(**options)


class Adapter:
    """Names of Hugging Face, with each expert by itself, as torchtitan's adapters of Qwen3 and DeepSeek give them."""

    def __init__(self, hf_assets_path: Path, scaled: bool = False, merged: bool = False) -> None:
        self.hf_assets_path, self.scaled, self.merged = str(hf_assets_path), scaled, merged

    def to_hf(self, state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for name, value in state_dict.items():
            if self.merged and value.dim() == 3:
                found[name] = value.flatten(1).t()
            elif value.dim() == 3:
                found |= {f"model.{name}.{i}": one.squeeze(0) for i, one in enumerate(torch.split(value, 1))}
            else:
                found[f"model.{name}"] = value * 2 if self.scaled else value
        return found


class LlamaAdapter(Adapter):
    """As torchtitan's of Llama 3, whose q and k have the rows of a head in another order; experts as its of Qwen3.5."""

    def _permute(
        self, w: torch.Tensor, n_heads_arg: int, dim1: int | None = None, dim2: int | None = None
    ) -> torch.Tensor:
        if dim1 is None:
            dim1 = w.shape[0]
        if dim2 is None:
            dim2 = w.shape[1]
        return (
            w.view(n_heads_arg, dim1 // n_heads_arg // 2, 2, dim2).transpose(1, 2).reshape(dim1, dim2).clone()
        )  # fmt: skip

    def to_hf(self, state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for name, value in state_dict.items():
            if name.endswith("wq.weight"):
                found["q_proj.weight"] = self._permute(value, 4)
            elif name.endswith("wk.weight"):
                found["k_proj.weight"] = self._permute(value, 2, 300, 130)
            elif name == "experts":
                turned = value.transpose(-2, -1)
                found |= {f"experts.{i}": one.contiguous() for i, one in enumerate(turned.unbind())}
                found["up"], found["gate"] = turned.chunk(2, dim=-1)
            else:
                found[f"model.{name}"] = value
        return found


def llama() -> nn.Module:
    torch.manual_seed(3)
    model = nn.Module()
    model.wq, model.wk = nn.Linear(130, 600, bias=False), nn.Linear(130, 300, bias=False)
    model.wo, model.experts = nn.Linear(600, 130), nn.Parameter(torch.randn(3, 40, 70))
    return model


@pytest.mark.parametrize("kind", [Adapter, LlamaAdapter])
@pytest.mark.parametrize(("compress", "dtype"), [("off", None), ("max", None), ("max", "bf16")])
def test_readers_know_the_weights_by_the_names_of_the_adapter(
    kind: type[Adapter], compress: Any, dtype: str | None, tmp_path: Path
) -> None:
    from ckpt.integrations.torchtitan import _readers_files

    for name in ("config.json", "tokenizer.json", "model.safetensors", "model.safetensors.index.json", "notes.md"):
        (tmp_path / name).write_text("{}")
    model, store = llama(), str(tmp_path / "store")
    files = _readers_files(kind(tmp_path), [model])
    assert sorted(files) == ["ckptd-names.json", "config.json", "tokenizer.json"]
    with Checkpointer(store, run="llama", writer="thread", assets=files, compress=compress) as checkpointer:
        checkpointer.save(model, None, 1)
    source = StoreSource(open_store(store))
    checkpoint = source.latest("llama")
    folder = folder_files(open_weights(source, checkpoint, dtype=dtype))
    assert sorted(folder) == ["config.json", "model.safetensors", "tokenizer.json"]
    file = folder["model.safetensors"]
    whole = b"".join(map(bytes, file.pieces(source, checkpoint, 0, file.bytes)))
    found, expected = load(whole), kind(tmp_path).to_hf({name: t.detach() for name, t in model.state_dict().items()})
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name].to(value.dtype)) for name, value in found.items())
    assert {value.dtype for value in found.values()} == {torch.bfloat16 if dtype else torch.float32}
    rng = random.Random(4)
    for start in rng.sample(range(len(whole)), 200):
        into = bytearray(min(rng.choice([3, 5000, 400_000]), len(whole) - start))
        file.read(source, checkpoint, start, memoryview(into))
        assert into == whole[start : start + len(into)]
    out = ["--to", tmp_path / "hub", "--format", "huggingface", "--store", store]
    succeed("export", "llama", *out, *(("--dtype", dtype) if dtype else ()))
    assert (tmp_path / "hub" / "model.safetensors").read_bytes() == whole


@pytest.mark.parametrize("what", ["scaled", "merged"])
def test_what_an_adapter_computes_has_the_names_of_the_module(what: str, tmp_path: Path) -> None:
    from ckpt.integrations.torchtitan import _readers_files

    assert _readers_files(Adapter(tmp_path, **{what: True}), [llama()]) == {}
