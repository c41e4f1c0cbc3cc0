"""Fine-tuning with transformers, PEFT and TRL: killed and resumed, and adapters as PEFT loads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

import ckpt
from ckpt.integrations.peft import adapter_files, adapters_alone
from tests.ckpt.integrations.proof import Integration
from tests.frameworks import train_tuning
from tests.support.command_line import invoke, succeed

TUNING = Integration(
    "tests.frameworks.train_tuning",
    (
        "JE_ARROW_MALLOC_CONF=background_thread:false", "transformers.trainer", "peft", "trl.trainer.sft_trainer",
        "trl.trainer.dpo_trainer", "trl.trainer.grpo_trainer", "ckpt.integrations.transformers",
        "tests.ckpt.integrations.proof", "tests.ckpt.integrations.fsdp2", "torch._dynamo",
    ),
)  # fmt: skip


@pytest.mark.parametrize("trainer", ["sft", "dpo", "grpo"])
def test_trl(tmp_path: Path, trainer: str) -> None:
    TUNING.resumes_exactly(tmp_path, "gpt", 10, trainer, "lora", resumed_at=8)


def test_trl_under_fsdp2(tmp_path: Path) -> None:
    TUNING.resumes_exactly(tmp_path, "gpt", 10, "sft", "lora", "fsdp", resumed_at=8, ranks=2)


def test_a_model_with_tied_weights_under_fsdp2(tmp_path: Path) -> None:
    TUNING.resumes_exactly(tmp_path, "gpt", 10, "fsdp", "tied", resumed_at=8, ranks=2)


@pytest.mark.parametrize("kind", ["lora", "dora", "prompt", "several"])
def test_adapters(tmp_path: Path, kind: str) -> None:
    TUNING.resumes_exactly(tmp_path, "gpt", 10, kind, resumed_at=8)
    loads_as_peft_does(tmp_path, kind)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_adapters_of_every_rank_under_fsdp2(tmp_path: Path, kind: str) -> None:
    TUNING.resumes_exactly(tmp_path, "gpt", 10, kind, "fsdp", resumed_at=8, ranks=2)
    loads_as_peft_does(tmp_path, kind)


def loads_as_peft_does(folder: Path, kind: str) -> None:
    """The exported folder is the one that PEFT writes of the same model, and loads onto a fresh base."""
    succeed("verify", "gpt", "--store", folder)
    trained = tuned(kind)
    trained.load_state_dict(torch.load(folder / "gpt-0.pt", weights_only=True))
    trained.save_pretrained(folder / "expected")
    reply: Any = succeed(
        "export", "gpt", "--to", folder / "hub", "--format", "peft", "--store", folder, "-o", "json"
    ).json
    configs = sorted(path.relative_to(folder / "expected") for path in (folder / "expected").rglob("*.json"))
    assert len(configs) == len(trained.peft_config)
    num_tensors = 0
    for config in configs:
        assert settings(folder / "hub" / config) == settings(folder / "expected" / config)
        weights = config.with_name("adapter_model.safetensors")
        exported, expected = load_file(folder / "hub" / weights), load_file(folder / "expected" / weights)
        assert exported.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in exported.items())
        num_tensors += len(exported)
    assert reply["num_entries"] == num_tensors
    loaded: Any = peft.PeftModel.from_pretrained(train_tuning.base(), folder / "hub")
    for name in set(trained.peft_config) - {"default"}:
        loaded.load_adapter(folder / "hub" / name, name)
    loaded.base_model.set_adapter(["default", "other"]) if kind == "several" else None
    ids = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        assert torch.equal(loaded.eval()(ids).logits, trained.eval()(ids).logits)


def settings(config: Path) -> dict[str, Any]:
    """PEFT writes sets as lists, in any order."""
    found: dict[str, Any] = json.loads(config.read_text())
    return {name: sorted(value) if isinstance(value, list) else value for name, value in found.items()}


def tuned(kind: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_tuning, "OPTIONS", [kind])
        return train_tuning.adapted(train_tuning.base())


def test_the_frozen_base_is_stored_once(tmp_path: Path) -> None:
    """Of a model whose base has 2 MB, and whose adapters and their state have 50 KB."""
    model: Any = peft.get_peft_model(
        LlamaForCausalLM(
            LlamaConfig(
                hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2, vocab_size=512
            )
        ),
        peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
    )
    optim = torch.optim.AdamW((one for one in model.parameters() if one.requires_grad), lr=0.1)
    base = sum(one.nbytes for one in model.parameters() if not one.requires_grad)
    with ckpt.Checkpointer(str(tmp_path), run="gpt", compress="off", writer="thread") as checkpointer:
        for step in range(4):
            model(torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
            optim.step()
            checkpointer.save(model, optim, step)
    *later, first = invoke("ls", "gpt", "--store", tmp_path, "-o", "json").json
    assert first["stored_bytes"] > base
    assert sum(one["stored_bytes"] for one in later) < base / 8


@pytest.mark.parametrize("kind", ["lora", "dora", "prompt", "several"])
def test_adapters_without_their_base(tmp_path: Path, kind: str) -> None:
    model = tuned(kind)
    optim = torch.optim.AdamW((one for one in model.parameters() if one.requires_grad), lr=0.1)

    def train() -> None:
        optim.zero_grad()
        model(torch.tensor([[3, 4, 5, 6]]), labels=torch.tensor([[3, 4, 5, 6]])).loss.backward()
        optim.step()

    train()
    options: Any = {"run": "gpt", "writer": "thread", "assets": adapter_files(model)}
    with ckpt.Checkpointer(str(tmp_path), **options) as checkpointer:
        checkpointer.save(adapters_alone(model), optim, 1)
    train()
    expected = {name: one.clone() for name, one in model.state_dict().items()}
    torch.save(expected, tmp_path / "gpt-0.pt")
    model = tuned(kind)  # a fresh base, with fresh adapters
    optim = torch.optim.AdamW((one for one in model.parameters() if one.requires_grad), lr=0.1)
    with ckpt.Checkpointer(str(tmp_path), **options) as checkpointer:
        assert checkpointer.restore(adapters_alone(model), optim)
        train()
        checkpointer.save(adapters_alone(model), optim, 2)
    assert all(torch.equal(one, expected[name]) for name, one in model.state_dict().items())
    loads_as_peft_does(tmp_path, kind)
