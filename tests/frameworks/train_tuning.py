"""Fine-tuning of a small Llama by the trainers of transformers and TRL; see tests/ckpt/integrations/proof.py.

Options: sft, dpo, grpo (TRL's trainers), lora, dora, prompt, several (adapters of PEFT), fsdp (FSDP2), tied (weights).
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from typing import Any

import peft
import torch
import trl
from datasets import Dataset
from peft import LoraConfig, PeftModel, PromptTuningConfig, TaskType
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.distributed.fsdp import FSDPModule
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from ckpt.integrations.transformers import keep_checkpoints
from tests.ckpt.ddp import join
from tests.ckpt.integrations.fsdp2 import allow_cpus
from tests.ckpt.integrations.proof import die_after, report, report_weights

FOLDER, RUN, OPTIONS = sys.argv[1], sys.argv[2], sys.argv[4:]
WORDS = ["<unk>", "<pad>", "<eos>", "to", "be", "or", "not", "that", "is", "the", "question", "whether", "it"]
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def base() -> Any:
    """A base model, which is the same in every process, as one that is downloaded."""
    torch.manual_seed(5)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(WORDS),
            pad_token_id=1,
            eos_token_id=2,
            bos_token_id=2,
            tie_word_embeddings="tied" in OPTIONS,
            **SIZES,
        )
    )


def tokenizer() -> Any:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    made: Any = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
    return made


def adapters() -> dict[str, Any]:
    chosen: dict[str, Any] = {
        "target_modules": ["q_proj", "v_proj"],
        "lora_dropout": 0.2,
        "task_type": TaskType.CAUSAL_LM,
    }
    if "prompt" in OPTIONS:
        return {"default": PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=3)}
    if "dora" in OPTIONS:
        return {"default": LoraConfig(r=2, use_dora=True, modules_to_save=["lm_head"], **chosen)}
    if "several" in OPTIONS:
        return {"default": LoraConfig(r=2, **chosen), "other": LoraConfig(r=3, **chosen)}
    return {"default": LoraConfig(r=2, **chosen)} if "lora" in OPTIONS else {}


def adapted(model: Any) -> Any:
    for name, config in adapters().items():
        if isinstance(model, PeftModel):
            model.add_adapter(name, config)
        else:
            model = peft.get_peft_model(model, config, name)
    if "several" in OPTIONS:
        model.base_model.set_adapter(["default", "other"])
    return model


class Reports(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        die_after(state.global_step)


def samples(kind: str) -> Any:
    words = WORDS[3:]
    texts = [" ".join(words[(i * j + j) % len(words)] for j in range(6)) for i in range(24)]
    if kind == "dpo":
        return [{"prompt": t[:12], "chosen": t[12:], "rejected": t[:6]} for t in texts]
    if kind == "grpo":
        return [{"prompt": text} for text in texts]
    if kind == "sft":
        return [{"text": text} for text in texts]
    return [{"input_ids": (ids := tokenizer()(text)["input_ids"]), "labels": ids} for text in texts]


def trainer_of(model: Any, kind: str, sharding: dict[str, Any]) -> Any:
    chosen: Any = {
        "sft": (trl.SFTTrainer, trl.SFTConfig), "dpo": (trl.DPOTrainer, trl.DPOConfig),
        "grpo": (trl.GRPOTrainer, trl.GRPOConfig), "plain": (Trainer, TrainingArguments),
    }[kind]  # fmt: skip
    own = {"grpo": {"num_generations": 4, "max_completion_length": 6}}.get(kind, {})
    arguments = chosen[1](
        f"{FOLDER}/out", **sharding, **own, ddp_backend="gloo" if "WORLD_SIZE" in os.environ else None,
        per_device_train_batch_size=4 if kind == "grpo" else 2, max_steps=14, seed=3,
        learning_rate=0.01, warmup_steps=3, logging_steps=1,
        report_to=[], disable_tqdm=True, save_steps=4, bf16=False,
        save_strategy="no" if "plain" in OPTIONS else "steps",
    )  # fmt: skip

    class Reporting(chosen[0]):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            report(self.state.global_step, loss)
            return loss

    given: dict[str, Any] = {}
    if kind == "grpo":
        given["reward_funcs"] = lambda completions, **_: [float(len(set(one))) for one in completions]
    return Reporting(
        model=model, args=arguments, train_dataset=Dataset.from_list(samples(kind)), processing_class=tokenizer(),
        callbacks=[Reports()], **given,
    )  # fmt: skip


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if "WORLD_SIZE" in os.environ:
        join()
    plain = "plain" in OPTIONS
    sharding: dict[str, Any] = {"use_cpu": True}
    if "fsdp" in OPTIONS:
        allow_cpus()
        wrapped = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
        sharding = {"fsdp": True, "fsdp_config": wrapped}
    model = base()
    torch.manual_seed(1 if plain or sys.argv[3] != "0" else 77)
    model = adapted(model)
    kind = next((one for one in OPTIONS if one in ("sft", "dpo", "grpo")), "plain")
    trainer = trainer_of(model, kind, sharding)
    if plain:
        trainer.train()
    else:
        keep_checkpoints(trainer, FOLDER, run=RUN).train(resume_from_checkpoint=True)
    assert isinstance(trainer.model_wrapped, FSDPModule) == ("fsdp" in OPTIONS)
    report_weights(trainer.model.state_dict(), FOLDER, RUN)


if __name__ == "__main__":
    main()
