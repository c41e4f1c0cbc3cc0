"""Saves small models, and reads them through the clients of the Hugging Face Hub, which find a daemon at HF_ENDPOINT.

    python -m tests.ckpt.integrations.read_hub STORE FOLDER

Fails unless every client has the model that was saved, bit by bit.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from huggingface_hub.cli.hf import main as hf
from tokenizers import Tokenizer, models, pre_tokenizers
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

from ckpt import Checkpointer
from tests.support.waiting import wait_until

SIZES: dict[str, Any] = {"vocab_size": 90, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {
    **SIZES, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
WORDS = {"[UNK]": 0, "a": 1, "checkpoint": 2, "is": 3, "served": 4}


def saved_models() -> dict[str, Any]:
    return {
        "gpt2": GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=32, **SIZES)),
        "team/llama": LlamaForCausalLM(LlamaConfig(tie_word_embeddings=True, **LLAMA)),
        "moe": MixtralForCausalLM(MixtralConfig(num_local_experts=4, **LLAMA)),
    }


def write_files(model: Any, folder: Path) -> Path:
    """The folder, with the configuration and the tokenizer of a model."""
    model.config.save_pretrained(folder)
    words = Tokenizer(models.WordLevel(WORDS, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(folder)
    return folder


def same(one: Any, other: Any, dtype: torch.dtype = torch.float32) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(v.to(dtype), theirs[name]) for name, v in mine.items())


def main(store: str, folder: Path) -> None:
    found = saved_models()
    for run, model in found.items():
        with Checkpointer(store, run=run, assets=write_files(model, folder / "files" / run)) as checkpointer:
            checkpointer.save(model, None, 1000)
            if run == "moe":
                broken = MixtralForCausalLM(model.config)
                torch.nn.init.constant_(next(broken.parameters()), torch.nan)
                checkpointer.save(broken, None, 2000)
    repositories = {run if "/" in run else f"runs/{run}": model for run, model in found.items()}
    wait_until(lambda: HfApi().list_repo_refs("runs/moe").branches[0].name == "step-2000", "the daemon's index")
    for number, (repository, model) in enumerate(repositories.items()):
        for revision in ("main", "step-1000"):
            assert same(model, AutoModelForCausalLM.from_pretrained(repository, revision=revision, dtype="float32"))
        half = AutoModelForCausalLM.from_pretrained(repository, revision="main+bf16", dtype=torch.bfloat16)
        assert same(model, half, torch.bfloat16)
        tokenizer = AutoTokenizer.from_pretrained(repository)
        assert tokenizer("a checkpoint is served").input_ids == [1, 2, 3, 4]
        sys.argv = ["hf", "download", repository, "--revision", "step-1000", "--local-dir", str(folder / str(number))]
        with suppress(SystemExit):
            hf()  # type: ignore[no-untyped-call]
        assert same(model, AutoModelForCausalLM.from_pretrained(folder / str(number)))
    print("as saved", len(repositories))


if __name__ == "__main__":
    assert os.environ["HF_ENDPOINT"].endswith("/hf")
    main(sys.argv[1], Path(sys.argv[2]))
