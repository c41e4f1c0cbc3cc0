"""Saves small models, and reads them through the clients of the Hugging Face Hub, which find a daemon at HF_ENDPOINT.

    python -m tests.ckpt.integrations.read_hub STORE FOLDER

GPT-2, a Llama with tied weights, a mixture of experts, LoRA on a frozen base, and a model that two ranks save under
FSDP2: each raw (step 1000) and coded (step 2000). Fails unless every client, `ckpt.load` and `ckptctl export` give what
was saved, bit by bit.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, HfFileSystem
from huggingface_hub.cli.hf import main as hf
from safetensors import safe_open
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
)

import ckpt
from ckpt import Checkpointer
from ckpt.config import Compress
from ckptctl.cli import app
from tests.ckpt.ddp import join
from tests.support.waiting import wait_until

SIZES: dict[str, Any] = {"vocab_size": 91, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {
    **SIZES, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
WORDS = {"[UNK]": 0, "a": 1, "checkpoint": 2, "is": 3, "served": 4}
STEPS: dict[int, Compress] = {1000: "off", 2000: "fast"}
"""How each is compressed."""
RANGES = 8
"""Of each file."""


class LowRank(nn.Linear):
    """A frozen layer, and what is trained on top of it."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__(width, out, bias=False)
        self.weight.requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(width, 4, bias=False), nn.Linear(4, out, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        adapted: torch.Tensor = super().forward(x) + self.lora_B(self.lora_A(x))
        return adapted


class Tuned(LlamaForCausalLM):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.q_proj = LowRank(32, 32)


def saved_models() -> dict[str, Any]:
    return {
        "gpt2": GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=32, **SIZES)),
        "team/llama": LlamaForCausalLM(LlamaConfig(tie_word_embeddings=True, **LLAMA)),
        "moe": MixtralForCausalLM(MixtralConfig(num_local_experts=4, **LLAMA)),
        "lora": Tuned(LlamaConfig(**LLAMA)),
        "fsdp2": LlamaForCausalLM(LlamaConfig(**LLAMA)),
    }


def write_files(model: Any, folder: Path) -> Path:
    """The folder, with the configuration and the tokenizer of a model."""
    model.config.save_pretrained(folder)
    words = Tokenizer(models.WordLevel(WORDS, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(folder)
    return folder


def save(store: str, run: str, model: Any, assets: Path) -> None:
    sizes = list[int]()
    for step, compress in STEPS.items():
        with Checkpointer(
            store, run=run, assets=assets, compress=compress, max_references=0, writer="thread"
        ) as checkpointer:
            sizes.append(checkpointer.save(model, None, step).stored_bytes)
    assert sizes[1] < 0.95 * sizes[0]


def save_as_rank(rank: int, store: str, model: Any, assets: Path) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MEETING": str(assets.parent / "meeting")}
    join()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    save(store, "fsdp2", model, assets)
    torch.distributed.destroy_process_group()


def save_all(store: str, found: Mapping[str, Any], folder: Path) -> None:
    """Ranks are forks, made before anything has threads."""
    assets = {run: write_files(model, folder / "files" / run) for run, model in found.items()}
    forks = multiprocessing.get_context("fork")
    ranks = [
        forks.Process(target=save_as_rank, args=(rank, store, found["fsdp2"], assets["fsdp2"])) for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0, 0]
    for run in found.keys() - {"fsdp2"}:
        save(store, run, found[run], assets[run])
    broken = MixtralForCausalLM(found["moe"].config)
    nn.init.constant_(next(broken.parameters()), torch.nan)
    with Checkpointer(store, run="moe", assets=assets["moe"], writer="thread") as checkpointer:
        checkpointer.save(broken, None, 3000)


def equal(mine: Mapping[str, Any], theirs: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> bool:
    return mine.keys() == theirs.keys() and all(torch.equal(v.to(dtype), theirs[name]) for name, v in mine.items())


def pretrained(model: Any, where: str | Path, dtype: str = "float32", **revision: str) -> Mapping[str, Any]:
    """What transformers reads, by name."""
    kind: Any = Tuned if isinstance(model, Tuned) else AutoModelForCausalLM
    state: Mapping[str, Any] = kind.from_pretrained(where, dtype=dtype, **revision).state_dict()
    return state


def check(store: str, run: str, step: int, model: Any, folder: Path) -> None:
    """One checkpoint, by every reader."""
    repository, revision, state = run if "/" in run else f"runs/{run}", f"step-{step}", model.state_dict()
    assert equal(state, pretrained(model, repository, revision=revision))
    sys.argv = ["hf", "download", repository, "--revision", revision, "--local-dir", str(folder / "hf")]
    with suppress(SystemExit):
        hf()  # type: ignore[no-untyped-call]
    assert equal(state, pretrained(model, folder / "hf"))
    export = ["export", f"{run}@{step}", "--to", str(folder / "export"), "--format", "huggingface"]
    with suppress(SystemExit):
        app([*export, "--store", store])
    files = {path.name: path.read_bytes() for path in (folder / "export").iterdir()}
    assert {path.name: path.read_bytes() for path in (folder / "hf").iterdir() if path.is_file()} == files
    data = files["model.safetensors"]
    virtual: Any = HfFileSystem(skip_instance_cache=True)
    path = f"{repository}@{revision}/model.safetensors"
    for start in random.sample(range(len(data)), RANGES):
        stop = start + random.randrange(9000)
        assert virtual.cat_file(path, start, stop) == data[start:stop]
    with safe_open(folder / "hf" / "model.safetensors", "pt") as opened:
        names, tied = list(opened.keys()), opened.metadata()
        tensors = {name: opened.get_tensor(name) for name in names}
    tensors |= {name: tensors[home] for name, home in tied.items() if home in tensors}
    assert equal(state, tensors)
    header = HfApi().get_safetensors_metadata(repository, revision=revision).files_metadata["model.safetensors"]
    assert {name: tuple(one.shape) for name, one in header.tensors.items()} == {n: tensors[n].shape for n in names}
    loaded = ckpt.load(f"{store}/{run.replace('/', '~')}@{step}", names="model/*")
    assert equal({f"model/{name}": value for name, value in state.items()}, loaded)


def main(store: str, folder: Path) -> None:
    found = saved_models()
    save_all(store, found, folder)
    wait_until(lambda: HfApi().list_repo_refs("runs/moe").branches[0].name == "step-3000", "the daemon's index")
    for run, model in found.items():
        repository = run if "/" in run else f"runs/{run}"
        for step in STEPS:
            (place := folder / f"{run}-{step}").mkdir(parents=True)
            check(store, run, step, model, place)
        assert equal(model.state_dict(), pretrained(model, repository))
        half = pretrained(model, repository, "bfloat16", revision="main+bf16")
        assert equal(model.state_dict(), half, torch.bfloat16)
        assert AutoTokenizer.from_pretrained(repository)("a checkpoint is served").input_ids == [1, 2, 3, 4]
    print("as saved", len(found))


if __name__ == "__main__":
    assert os.environ["HF_ENDPOINT"].endswith("/hf")
    main(sys.argv[1], Path(sys.argv[2]))
