"""One small model in each stage of ZeRO, under fully_shard and in plain torch; and its whole state by each one's own
means."""

from __future__ import annotations

import os
import sys
from typing import Any

without: dict[str, Any] = {"pyarrow": None}  # it starts a thread, and a process with threads must not be forked
sys.modules.update(without)

import deepspeed  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from deepspeed.accelerator import get_accelerator  # noqa: E402
from deepspeed.runtime.zero.partition_parameters import GatheredParameters  # noqa: E402
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state  # noqa: E402
from torch import nn  # noqa: E402
from torch._C._distributed_c10d import FileStore, HashStore  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

for name in without:  # tests of others in this process need it
    del sys.modules[name]

LAYOUTS = ("zero1", "zero2", "zero3", "fsdp2", "plain")
MOMENTS = ("exp_avg", "exp_avg_sq")


class Model(nn.Module):
    """Odd sizes, so that partitions end within parameters; a tied and a frozen parameter, a single element, buffers."""

    seen: torch.Tensor

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(11, 7)
        self.frozen = nn.Linear(7, 7)
        self.hidden = nn.Sequential(nn.Linear(7, 13), nn.Dropout(0.2), nn.Tanh(), nn.Linear(13, 7))
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.head = nn.Linear(7, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("hidden_buffer", torch.ones(2), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        inner = self.frozen(self.embed(tokens))
        found: torch.Tensor = self.head(inner + self.hidden(inner) * self.scale)
        return found

    def groups(self) -> list[dict[str, Any]]:
        named = [(name, one) for name, one in self.named_parameters() if one.requires_grad]
        weights = [one for name, one in named if name.endswith("weight")]
        others = [one for name, one in named if not name.endswith("weight")]
        return [{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 0.02}]


def join() -> int:
    """Join the ranks; returns the rank."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    meeting = os.environ.get("MEETING")
    store = FileStore(meeting, world) if meeting else HashStore()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    os.environ.setdefault("LOCAL_RANK", str(rank))
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiling it takes longer than a test
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    get_accelerator().is_fp16_supported = lambda: True  # torch computes it on a CPU, if slowly
    return rank


def engine(stage: int, dtype: str = "fp32", tied: bool = True, **config: Any) -> Any:
    """An engine with a dynamic loss scale in fp16, and a scheduler."""
    model = Model(tied)
    optim = torch.optim.AdamW(model.groups(), lr=0.01)
    sched = torch.optim.lr_scheduler.StepLR(optim, 2, gamma=0.5)
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 8, "sub_group_size": 100},
    }
    if dtype == "fp16":
        settings["fp16"] = {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 2, "hysteresis": 2}
    elif dtype == "bf16":
        settings["bf16"] = {"enabled": True}
    settings |= config
    found, *_ = deepspeed.initialize(model=model, optimizer=optim, lr_scheduler=sched, config=settings)
    return found


def train(built: Any, steps: range) -> list[str]:
    """Losses of these steps, exact."""
    losses = []
    for step in steps:
        rank = dist.get_rank()
        tokens = torch.randint(11, (4, 5), generator=torch.Generator().manual_seed(100 * step + rank))
        loss = nn.functional.cross_entropy(built(tokens).flatten(0, 1).float(), tokens.flatten())
        built.backward(loss)
        built.step()
        losses.append(float(loss).hex())
    return losses


class Plain:
    """A loop without DeepSpeed, also under fully_shard."""

    def __init__(self, sharded: bool) -> None:
        self.module: Any = Model()
        if sharded:
            fully_shard(self.module.hidden)
            fully_shard(self.module)
        self.optim = torch.optim.AdamW(self.module.groups(), lr=0.01)

    def __call__(self, tokens: torch.Tensor) -> Any:
        return self.module(tokens)

    def backward(self, loss: torch.Tensor) -> None:
        torch.autograd.backward(loss)

    def step(self) -> None:
        self.optim.step()
        self.optim.zero_grad()


def build(layout: str, dtype: str, **config: Any) -> Any:
    return engine(int(layout[4:]), dtype, **config) if layout.startswith("zero") else Plain(layout == "fsdp2")


def whole(built: Any) -> dict[str, torch.Tensor]:
    """Masters, moments, steps and buffers by name, whole; collective. Of an engine also its parameters."""
    stepped = isinstance(built, Plain) or any(built.optimizer.optimizer.state.values())
    if stepped and hasattr(getattr(built, "optimizer", None), "_hp_optimizer_states_linked"):
        built.optimizer._hp_optimizer_states_linked = False  # it forgets all groups but the first
        built.optimizer._lazy_init_hp_params_optimizer_state()
    state: dict[str, torch.Tensor] = {name: one.clone().float() for name, one in built.module.named_buffers()}
    for name, parameter in built.module.named_parameters():
        if isinstance(built, Plain):
            master, held = parameter, built.optim.state.get(parameter, {})
            moments = {key: held.get(key) for key in (*MOMENTS, "step")}
        else:
            with GatheredParameters([parameter]):
                own = parameter.detach().clone()
            trains = parameter.requires_grad
            master = safe_get_full_fp32_param(parameter) if trains else own.float()
            assert torch.equal(own, master.to(own.dtype)), name
            moments = {}
            if trains and stepped:
                moments = {key: safe_get_full_optimizer_state(parameter, key) for key in MOMENTS}
                moments["step"] = next(iter(built.optimizer.optimizer.state.values()))["step"]
        state[name] = _full(master)
        state |= {f"{name}/{key}": _full(one) for key, one in moments.items() if one is not None}
    return state


def _full(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.detach().clone()


def differences(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    names = sorted(one.keys() ^ other.keys())
    return names + [name for name in one.keys() & other.keys() if not torch.equal(one[name], other[name])]
