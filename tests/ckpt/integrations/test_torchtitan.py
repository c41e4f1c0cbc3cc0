from __future__ import annotations

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
from tests.support.command_line import invoke

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

    def __init__(self, hf_assets_path: Path, transposed: bool = False) -> None:
        self.hf_assets_path, self.transposed = str(hf_assets_path), transposed

    def to_hf(self, state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for name, value in state_dict.items():
            if value.dim() == 3:
                found |= {f"model.{name}.{i}": one.squeeze(0) for i, one in enumerate(torch.split(value, 1))}
            else:
                found[f"model.{name}"] = value.t().contiguous() if self.transposed else value
        return found


def test_readers_know_the_weights_by_the_names_of_the_adapter(tmp_path: Path) -> None:
    from ckpt.integrations.torchtitan import _readers_files

    for name in ("config.json", "tokenizer.json", "model.safetensors", "model.safetensors.index.json", "notes.md"):
        (tmp_path / name).write_text("{}")
    model = nn.Linear(4, 8)
    model.experts = nn.Parameter(torch.randn(2, 4, 3))
    files = _readers_files(Adapter(tmp_path), [model])
    assert sorted(files) == ["ckptd-names.json", "config.json", "tokenizer.json"]
    with Checkpointer(str(tmp_path / "store"), run="qwen", writer="thread", assets=files) as checkpointer:
        checkpointer.save(model, None, 1)
    source = StoreSource(open_store(str(tmp_path / "store")))
    checkpoint = source.latest("qwen")
    folder = folder_files(open_weights(source, checkpoint))
    weights = folder.pop("model.safetensors")
    found = load(b"".join(map(bytes, weights.pieces(source, checkpoint, 0, weights.bytes))))
    expected = Adapter(tmp_path).to_hf(dict(model.state_dict()))
    assert found.keys() == expected.keys() >= {"model.experts.1"}
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    assert sorted(folder) == ["config.json", "tokenizer.json"]
    assert "ckptd-names.json" not in _readers_files(Adapter(tmp_path, transposed=True), [model])
