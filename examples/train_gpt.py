"""Train a small GPT on the sources of the Python standard library, with checkpoints.

    python examples/train_gpt.py --store file:///tmp/ckpts --run-name gpt-small
    torchrun --nproc-per-node 2 examples/train_gpt.py --store file:///tmp/ckpts --run-name gpt-small

Kill it at any time and start it again with the same arguments: it resumes from the newest
checkpoint, and the losses equal those of an uninterrupted run, bit for bit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.progress import BarColumn, Progress, TextColumn
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import ckpt

CONTEXT = 64
BATCH = 8
ACCUMULATE = 2
"""Micro-batches per optimizer step. Saving between steps means saving at the end of a window."""
VOCABULARY = 256  # bytes


class Block(nn.Module):
    """Causal self-attention and a two-layer perceptron, each on a residual branch."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = nn.Dropout(dropout)
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) to the same."""
        batch, time, width = x.shape
        projected = self.query_key_value(self.attention_norm(x)).view(batch, time, 3, self.heads, -1)
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.attention_out(attended.transpose(1, 2).reshape(batch, time, width)))
        residual: Tensor = self.dropout(self.perceptron(x))
        return x + residual


class GPT(nn.Module):
    """A decoder over bytes. Input and output embeddings share their weights."""

    def __init__(self, width: int = 192, heads: int = 6, depth: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(0.02 * torch.randn(CONTEXT, width))
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        nn.init.normal_(self.token.weight, std=0.02)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy of predicting `targets`."""
        logits = self.head(self.norm(self.blocks(self.token(tokens) + self.position)))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Batches:
    """Random windows of the text. The n-th batch depends on the seed and n alone, so its state is one number."""

    def __init__(self, text: Tensor, seed: int) -> None:
        self.text = text
        self.seed = seed
        self.position = 0

    def next(self) -> tuple[Tensor, Tensor]:
        """Tokens and, one to the right, their targets."""
        generator = torch.Generator().manual_seed((self.seed << 32) + self.position)
        self.position += 1
        starts = torch.randint(len(self.text) - CONTEXT, (BATCH, 1), generator=generator)
        windows = self.text[starts + torch.arange(CONTEXT + 1)].long()
        return windows[:, :-1], windows[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        """The position in the stream of batches."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position."""
        self.position = state["position"]


def standard_library() -> Tensor:
    """The top-level modules of the standard library, as bytes."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def train_step(model: nn.Module, optim: torch.optim.Optimizer, loader: Batches) -> float:
    """One optimizer step over a window of micro-batches; the mean loss of all ranks."""
    total = torch.zeros(())
    for _ in range(ACCUMULATE):
        loss = model(*loader.next()) / ACCUMULATE
        loss.backward()
        total += loss.detach()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optim.step()
    optim.zero_grad()
    if dist.is_initialized():
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return total.item()


def fingerprint(model: nn.Module) -> str:
    """A hash of every bit of the weights."""
    sha = hashlib.sha256()
    for parameter in model.parameters():
        sha.update(parameter.detach().numpy().tobytes())
    return sha.hexdigest()


class Display:
    """Two bars, training and the save under way, and a log of one JSON object per step. Rank 0 only."""

    def __init__(self, steps: int, log: Path | None, rank: int) -> None:
        self.bars = Progress(
            TextColumn("{task.description:>9}"), BarColumn(), TextColumn("{task.fields[note]}"), disable=rank > 0
        )
        self.training = self.bars.add_task("training", total=steps, note="")
        self.saving = self.bars.add_task("saving", total=None, note="nothing yet", start=False)
        self.log = log.open("a", buffering=1) if log and rank == 0 else None

    def step(self, step: int, loss: float, saving: bool) -> None:
        """Show and log a finished step."""
        self.bars.update(self.training, completed=step, note=f"step {step}  loss {loss:.4f}")
        self.write({"step": step, "loss": loss, "saving": saving})

    def save(self, handle: ckpt.SaveHandle) -> None:
        """Show the progress of the newest save."""
        done, total = handle.progress
        note = f"step {handle.step} {'durable' if handle.done() else 'under way'}"
        self.bars.update(self.saving, completed=done, total=total, note=note)

    def write(self, record: dict[str, Any]) -> None:
        """One line of the log. JSON spells a float so that reading it back gives the same bits."""
        if self.log:
            self.log.write(json.dumps(record) + "\n")


def train(args: argparse.Namespace) -> None:
    """Build everything, restore the newest checkpoint, and train to the last step."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)  # sums are equal on any number of cores, and the saver has its own core
    torch.manual_seed(0)
    model: nn.Module = GPT()
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    torch.manual_seed(1 + rank)  # dropout differs from rank to rank
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    sched = torch.optim.lr_scheduler.OneCycleLR(optim, max_lr=3e-3, total_steps=args.steps + 1)
    loader = Batches(standard_library(), seed=rank)

    with ckpt.Checkpointer(args.store, run=args.run_name, daemon=args.daemon) as checkpoints:
        restored = checkpoints.restore(model, optim, scheduler=sched, loader=loader)
        start = restored.step + 1 if restored else 1
        if rank == 0:
            print(f"resumed from {restored.id}" if restored else "no checkpoint yet: starting from scratch", flush=True)
        display, handle = Display(args.steps, args.loss_log, rank), None
        with display.bars:
            for step in range(start, args.steps + 1):
                loss = train_step(model, optim, loader)
                sched.step()
                if saving := step % args.save_every == 0:
                    handle = checkpoints.save_async(
                        model, optim, step, scheduler=sched, loader=loader, metrics={"loss": loss}
                    )
                    handle.wait_staged()  # from here on the save survives SIGKILL; the log records it next
                display.step(step, loss, saving)
                if handle is not None:
                    display.save(handle)
            checkpoints.wait()  # all saves are durable from here on
            if handle is not None:
                display.save(handle)
    display.write({"weights": fingerprint(model)})


def main() -> None:
    """Parse the arguments; join the process group under torchrun."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", default="file:///tmp/ckpts", help="where checkpoints go: any fsspec URL")
    parser.add_argument("--run-name", default="gpt-small", help="name of the training run")
    parser.add_argument("--daemon", help="URL of a ckptd to notify (default: $CKPTD_URL, or none)")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--loss-log", type=Path, help="append one JSON object per step to this file")
    args = parser.parse_args()
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    train(args)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
