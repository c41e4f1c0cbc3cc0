"""An engine of vLLM with the load format and the weight transfer of ckptd, and what it answers."""

from __future__ import annotations

from typing import Any

import torch
from vllm import LLM, SamplingParams

PROMPT = [5, 17, 200, 3, 99, 42, 7]
NEW = 8


def engine(folder: str, named: dict[str, str], **options: Any) -> LLM:
    """With the configuration in a folder, and the checkpoint that is named."""
    return LLM(
        folder, load_format="ckptd", model_loader_extra_config=named, skip_tokenizer_init=True,
        dtype="float32", enforce_eager=True, max_model_len=32, max_num_seqs=1, max_logprobs=-1,
        enable_prefix_caching=False, weight_transfer_config={"backend": "ckptd"}, **options,
    )  # fmt: skip


def answers(llm: LLM, **options: Any) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens, and the logarithms of all probabilities after each token of the prompt."""
    asked = SamplingParams(temperature=0, max_tokens=NEW, prompt_logprobs=-1, ignore_eos=True, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": PROMPT}], asked, use_tqdm=False, **options)
    rows = [[row[token].logprob for token in range(256)] for row in output.prompt_logprobs[1:]]
    return list(output.outputs[0].token_ids), torch.tensor(rows)
