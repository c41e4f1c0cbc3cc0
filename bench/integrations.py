"""The stall of a save in training frameworks: through the integration, by `save_async` alone, and the framework's own.

Each framework trains one model with AdamW in its own loop. Every second step one of the three saves the same state, in
turns; the next turn begins when the save is durable. Each round begins with another one, so that none is always the one
after the framework's own. The stall is the time in the call, and what `optim.step()` waited.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from bench.gpt import GPT
from bench.measuring import Spread, rotated, seconds
from bench.report import Goal, Report
from ckpt import Checkpointer
from ckpt.snapshot.handle import SaveHandle

GOAL = 1.5
ROUNDS, QUICK_ROUNDS, WARM = 10, 10, 1
"""Saves of each contestant; the first one allocates memory and starts a process."""
KNOBS: dict[str, Any] = {"max_references": 0}

Save = Callable[[], SaveHandle | None]


class Text(Dataset[dict[str, torch.Tensor]]):
    """Bytes without meaning."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"tokens": torch.arange(index, index + 17) % 256}


class Turns:
    """Measures the contestants in a loop, one at each call of `step`, with a step without a save in between."""

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds
        self.stalls: dict[str, list[float]] = {}
        self._contestants: dict[str, Save] = {}
        self._pending: tuple[str, float, SaveHandle | None] | None = None

    def enter(self, **contestants: Save) -> None:
        """Their names, and how they save."""
        self._contestants = contestants
        self.stalls = {name: [] for name in contestants}
        names = list(contestants)
        self._order = chain.from_iterable(rotated(names, turn) for turn in count())

    @property
    def done(self) -> bool:
        """Whether each has saved often enough."""
        return bool(self.stalls) and all(len(found) >= self._rounds for found in self.stalls.values())

    def step(self) -> None:
        """After each step of training."""
        pending, self._pending = self._pending, None
        if pending is not None:
            name, called, handle = pending
            if handle is not None:
                handle.result()
            self.stalls[name].append(called + (0.0 if handle is None else handle.timings.held_s))
        elif not self.done:
            name, handles = next(self._order), []
            called = seconds(lambda: handles.append(self._contestants[name]()))
            self._pending = name, called, handles[0]


def measure(quick: bool) -> Report:
    """All frameworks."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    shape, rounds = ((64, 2), QUICK_ROUNDS) if quick else ((512, 8), ROUNDS)
    rows, goals = [], []
    facts: dict[str, float] = {}
    problems: dict[str, str] = {}
    state_bytes = 12 * sum(p.numel() for p in GPT(*shape, 32).parameters())
    for name, train in (("lightning", _lightning), ("transformers", _transformers), ("accelerate", _accelerate)):
        with tempfile.TemporaryDirectory() as folder:
            turns = Turns(rounds)
            try:
                train(turns, GPT(*shape, 32), folder)
            except ImportError as error:
                problems[name] = str(error)
                continue
        found = {one: Spread.of([1000 * s for s in stalls[WARM:]]) for one, stalls in turns.stalls.items()}
        ratio = found["integration"].median / found["save_async"].median
        rows += [[name, one, str(spread)] for one, spread in found.items()]
        goals.append(Goal(name, "save_async", ratio, GOAL, "at most"))
        facts |= {f"{name}, {one}, ms": spread.median for one, spread in found.items()}
    return Report(
        "integrations",
        f"stall of a save, {state_bytes / 1e6:.1f} MB of weights and moments, {rounds - WARM} saves each",
        ("framework", "saved by", "ms, median (quartiles)"),
        rows,
        goals,
        problems=problems,
        state_bytes=state_bytes,
        facts=facts,
    )


def _lightning(turns: Turns, model: GPT, folder: str) -> None:
    from lightning.pytorch import Callback, LightningModule, Trainer

    from ckpt.integrations.lightning import CkptdCheckpoint

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.gpt = model

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            return self.gpt.loss(batch["tokens"])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    ours = CkptdCheckpoint(f"{folder}/store", "ours", every_n_train_steps=10**9, **KNOBS)
    alone = Checkpointer(f"{folder}/store", run="alone", **KNOBS)

    def through(trainer: Any) -> SaveHandle:
        ours._save(trainer)
        assert ours._newest is not None
        return ours._newest

    class Measures(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            turns.enter(
                integration=partial(through, trainer),
                save_async=lambda: alone.save_async(trainer.model, trainer.optimizers[0], trainer.global_step),
                own=lambda: trainer.save_checkpoint(f"{folder}/own.ckpt", weights_only=False),
            )

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            turns.step()
            trainer.should_stop = turns.done

    trainer = Trainer(
        accelerator="cpu", max_epochs=1, logger=False, callbacks=[Measures(), ours], default_root_dir=folder,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(Text(), batch_size=1))
    alone.close()


def _transformers(turns: Turns, model: GPT, folder: str) -> None:
    from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

    from ckpt.integrations.transformers import keep_checkpoints

    class Model(PreTrainedModel):
        config_class = PretrainedConfig

        def __init__(self) -> None:
            super().__init__(PretrainedConfig())
            self.gpt = model
            self.post_init()

        def forward(self, tokens: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
            return {"loss": self.gpt.loss(tokens)}

    class Measures(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            turns.enter(
                integration=through,
                save_async=lambda: alone.save_async(
                    trainer.model, trainer.optimizer.optimizer, trainer.state.global_step
                ),
                own=lambda: Trainer._save_checkpoint(trainer, trainer.model, None),
            )

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            turns.step()
            control.should_training_stop = turns.done

    arguments = TrainingArguments(
        folder, use_cpu=True, per_device_train_batch_size=1, max_steps=10**6, save_strategy="no", report_to=[],
        disable_tqdm=True, logging_strategy="no", save_total_limit=1,
    )  # fmt: skip
    trainer: Any = Trainer(Model(), arguments, train_dataset=Text(), callbacks=[Measures()])
    keep_checkpoints(trainer, f"{folder}/store", "ours", **KNOBS)
    alone = Checkpointer(f"{folder}/store", run="alone", **KNOBS)
    handles: list[SaveHandle] = []
    save_async = trainer._checkpointer.save_async

    def remembered(*args: Any, **kwargs: Any) -> SaveHandle:
        handles.append(save_async(*args, **kwargs))
        return handles[-1]

    trainer._checkpointer.save_async = remembered

    def through() -> SaveHandle:
        trainer._save_checkpoint(trainer.model, None)
        return handles[-1]

    trainer.train()
    alone.close()
    trainer._checkpointer.close()


def _accelerate(turns: Turns, model: GPT, folder: str) -> None:
    from accelerate import Accelerator

    import ckpt
    from ckpt.integrations.accelerate import load_state, save_state

    accelerator: Any = Accelerator(cpu=True)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-4)
    prepared, optim, loader = accelerator.prepare(model, plain, DataLoader(Text(), batch_size=1))
    ckpt.init(f"{folder}/store", run="ours", **KNOBS)
    load_state(accelerator)
    alone = Checkpointer(f"{folder}/store", run="alone", **KNOBS)
    turns.enter(
        integration=lambda: save_state(accelerator, 1),
        save_async=lambda: alone.save_async(prepared, plain, 1),
        own=lambda: accelerator.save_state(str(Path(folder) / "own")) and None,
    )
    for batch in loader:
        accelerator.backward(prepared.loss(batch["tokens"]))
        optim.step()
        optim.zero_grad()
        turns.step()
        if turns.done:
            break
    alone.close()
    ckpt.close()
