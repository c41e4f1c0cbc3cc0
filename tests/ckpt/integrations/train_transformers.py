"""Training with the Trainer of transformers; see proof.py. Options: val (evaluation), greater (is
better), sets (five of them for evaluation), limit=N, epoch (saves), weights (saves them alone), fsdp (FSDP2)."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

from ckpt.integrations.transformers import keep_checkpoints
from tests.ckpt.ddp import join
from tests.ckpt.integrations.fsdp2 import allow_cpus
from tests.ckpt.integrations.proof import die_after, report, report_weights

FOLDER, RUN, OPTIONS = sys.argv[1], sys.argv[2], sys.argv[4:]
INPUTS = torch.randn(40, 4, generator=torch.Generator().manual_seed(5))
SAMPLES = [{"x": x} for x in INPUTS]


class Config(PretrainedConfig):
    model_type = "tiny"


class Model(PreTrainedModel):
    config_class = Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.post_init()

    def get_input_embeddings(self) -> None:
        """It has none; Accelerate asks."""

    def forward(self, x: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        loss = self.net(x).square().mean()
        return {"loss": loss, "logits": loss.detach().reshape(1)}


class Reports(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        die_after(state.global_step)


class Reporting(Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        report(self.state.global_step, loss)
        return loss


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        join()
    torch.manual_seed(1 if "plain" in OPTIONS or sys.argv[3] != "0" else 77)
    limit = next((int(one[6:]) for one in OPTIONS if one.startswith("limit=")), None)
    val = "val" in OPTIONS
    sharding: dict[str, Any] = {"use_cpu": True}
    if "fsdp" in OPTIONS:
        allow_cpus()
        sharding = {"fsdp": True, "fsdp_config": {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 30}}
    arguments = TrainingArguments(
        f"{FOLDER}/out", **sharding, ddp_backend="gloo" if world > 1 else None,
        per_device_train_batch_size=4, num_train_epochs=3, seed=3,
        learning_rate=0.01, warmup_steps=5, logging_steps=1, report_to=[], disable_tqdm=True,
        save_steps=4, save_only_model="weights" in OPTIONS, label_names=["x"],
        save_strategy="no" if "plain" in OPTIONS else "epoch" if "epoch" in OPTIONS else "steps",
        eval_strategy="steps" if val else "no", eval_steps=4, save_total_limit=limit,
        load_best_model_at_end=val and "plain" not in OPTIONS, greater_is_better="greater" in OPTIONS,
        metric_for_best_model=("0_loss" if "sets" in OPTIONS else "loss") if val else None,
    )  # fmt: skip
    model = Model(Config())
    torch.manual_seed(1 if "plain" in OPTIONS or sys.argv[3] != "0" else 78)
    samples: Any = {str(i): SAMPLES[:8] for i in range(5)} if "sets" in OPTIONS else SAMPLES[:8]
    trainer = Reporting(model, arguments, train_dataset=SAMPLES, eval_dataset=samples, callbacks=[Reports()])
    if "plain" in OPTIONS:
        trainer.train()
    else:
        keep_checkpoints(trainer, FOLDER, run=RUN).train(resume_from_checkpoint=True)
    if not val:
        assert isinstance(trainer.model_wrapped, FSDPModule) == ("fsdp" in OPTIONS)
        report_weights(model.state_dict(), FOLDER, RUN)
    elif "plain" not in OPTIONS:
        assert str(trainer.state.best_model_checkpoint).startswith("ckptd://")
        torch.save(dict(model.state_dict()), Path(FOLDER) / "best.pt")


if __name__ == "__main__":
    main()
