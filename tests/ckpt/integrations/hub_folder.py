"""A small GPT-2 with a tokenizer: `python -m PROGRAM FOLDER KIND` trains and saves it by one of the integrations, and
`python -m PROGRAM FOLDER load` loads the folder `hub` as a program of transformers does. Both print JSON.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import fsspec
import torch
from accelerate import Accelerator
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

import ckpt
from ckpt.integrations.accelerate import load_state, save_state
from ckpt.integrations.lightning import CkptdCheckpoint
from ckpt.integrations.transformers import keep_checkpoints

FOLDER = Path(sys.argv[1])
IDS = torch.tensor([1, 2, 3, 1])
SAMPLES: Any = [{"input_ids": IDS, "labels": IDS}] * 4


def tokenizer() -> Any:
    words = Tokenizer(models.WordLevel({"<unk>": 0, "to": 1, "be": 2, "or": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    made: Any = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", pad_token="<unk>")
    made.chat_template = "{{ messages }}"
    return made


class Module(LightningModule):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.tokenizer = model, tokenizer()

    def training_step(self, batch: Any, number: int) -> Any:
        return self.model(**batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def by_transformers(model: Any) -> None:
    arguments = TrainingArguments(
        str(FOLDER / "out"), use_cpu=True, max_steps=2, save_steps=1, report_to=[], disable_tqdm=True
    )
    trainer: Any = Trainer(model, arguments, train_dataset=SAMPLES, processing_class=tokenizer())
    keep_checkpoints(trainer, str(FOLDER), run="gpt").train(resume_from_checkpoint=True)


def by_accelerate(model: Any) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(model)
    ckpt.init(str(FOLDER), run="gpt")
    load_state(accelerator)
    save_state(accelerator, 1)
    ckpt.close()


def by_lightning(model: Any) -> None:
    for max_steps in (1, 2):
        trainer = LightningTrainer(
            accelerator="cpu", max_steps=max_steps, logger=False, callbacks=[CkptdCheckpoint(str(FOLDER), run="gpt")],
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=FOLDER,
        )  # fmt: skip
        trainer.fit(Module(model), DataLoader(SAMPLES, batch_size=1), ckpt_path="last")
    opened: Any = fsspec
    with opened.open("ckptd://gpt@latest/config.json", url=str(FOLDER)) as file:  # the integration has paths of its own
        assert json.load(file)["architectures"] == ["GPT2LMHeadModel"]


def logits(model: Any) -> list[str]:
    with torch.no_grad():
        return [value.hex() for value in model.eval()(IDS[None]).logits.flatten().tolist()]


def load() -> dict[str, Any]:
    model: Any = AutoModelForCausalLM.from_pretrained(FOLDER / "hub")
    said = {"logits": logits(model), "architectures": model.config.architectures}
    if (FOLDER / "hub" / "tokenizer.json").exists():
        words = AutoTokenizer.from_pretrained(FOLDER / "hub")
        said |= {"ids": words("to be or to")["input_ids"], "chat": words.chat_template}
    return said


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if sys.argv[2] == "load":
        print(json.dumps(load()))
        return
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=4, n_positions=8, n_embd=8, n_layer=1, n_head=2))
    globals()[f"by_{sys.argv[2]}"](model)
    print(json.dumps({"logits": logits(model)}))


if __name__ == "__main__":
    main()
