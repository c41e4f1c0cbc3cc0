"""Training with DeepSpeed; see tests/ckpt/integrations/proof.py. Options: the stage, zero1 to zero3; bf16 or fp16.

In fp16 the loss scale begins so high that steps are skipped, also after the kill.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import ckpt
from ckpt.integrations.deepspeed import restore, save_async
from tests.ckpt.integrations.proof import die_after, report, report_weights
from tests.frameworks.zero import engine, join

FOLDER, RUN, OPTIONS = sys.argv[1], sys.argv[2], sys.argv[4:]
SAMPLES = TensorDataset(torch.randint(11, (80, 5), generator=torch.Generator().manual_seed(5)))
STAGE = next(int(one[4:]) for one in OPTIONS if one.startswith("zero"))
DTYPE = next((one for one in OPTIONS if one in ("bf16", "fp16")), "fp32")
WINDOW = 2


def main() -> None:
    warnings.simplefilter("ignore")
    rank = join()
    plain = "plain" in OPTIONS
    torch.manual_seed(rank if plain or sys.argv[3] != "0" else 77)
    built: Any = engine(STAGE, DTYPE, tied=False, gradient_accumulation_steps=WINDOW)
    torch.manual_seed(rank if plain or sys.argv[3] != "0" else 77)
    sampler: Any = DistributedSampler(SAMPLES, shuffle=True, seed=3)
    loader: Any = DataLoader(SAMPLES, 4, sampler=sampler)
    if not plain:
        loader = ckpt.data.resumable(loader)
        ckpt.init(FOLDER, run=RUN, max_references=0)  # skipped steps change nothing, and an old save would be kept
        restore(built, loader=loader)
    step = built.micro_steps
    for epoch in range(0 if plain else loader.epoch, 2):
        (sampler if plain else loader).set_epoch(epoch)
        for (tokens,) in loader:
            loss = torch.nn.functional.cross_entropy(built(tokens).flatten(0, 1).float(), tokens.flatten())
            built.backward(loss)
            built.step()
            report(step, loss.detach() + built.skipped_steps + built.get_lr()[0])
            if not plain and built.micro_steps % (2 * WINDOW) == 0:
                save_async(built, built.global_steps, loader=loader)
            die_after(step)
            step += 1
    if not plain:
        ckpt.close()
    own = Path(FOLDER, f"own-{RUN}")
    built.save_checkpoint(str(own), tag="end")
    torch.distributed.barrier()
    whole = get_fp32_state_dict_from_zero_checkpoint(str(own))
    # Of ZeRO 1 it leaves out what is not trained; with ZeRO 3 the module has no elements.
    module = {name: one for name, one in built.module.state_dict().items() if one.numel()}
    report_weights(module | whole, FOLDER, RUN)


if __name__ == "__main__":
    main()
