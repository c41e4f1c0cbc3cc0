"""The Trainer of transformers: one call replaces its checkpoint folders.

python examples/train_transformers.py file:///tmp/ckpts 4     # ends after 4 steps
python examples/train_transformers.py file:///tmp/ckpts       # goes on to the end
"""

from __future__ import annotations

import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainingArguments

from ckpt.integrations.transformers import keep_checkpoints


def main(store: str, max_steps: int = 10) -> None:
    """Train a very small GPT-2 on random tokens."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))
    rows = torch.randint(64, (40, 16), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in rows]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=max_steps, save_steps=2, logging_steps=1, per_device_train_batch_size=4,
            lr_scheduler_type="constant", use_cpu=True, report_to="none", disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=data)
        trainer.remove_callback(PrinterCallback)
        keep_checkpoints(trainer, store, run="transformers")
        trainer.train(resume_from_checkpoint=True)
        for entry in trainer.state.log_history:
            if "loss" in entry:
                print(f"step {entry['step']}  loss {entry['loss']:.6f}")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
