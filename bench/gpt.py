"""A small GPT over bytes, and the two ways its training keeps numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256
HEADS = 8


class Block(nn.Module):
    """Attention and feed-forward, as in GPT-2."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(dim)
        self.attention = nn.Linear(dim, 3 * dim)
        self.projection = nn.Linear(dim, dim)
        self.norm_2 = nn.LayerNorm(dim)
        self.wide = nn.Linear(dim, 4 * dim)
        self.narrow = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Batch, position, dim."""
        batch, length, dim = x.shape
        heads = self.attention(self.norm_1(x)).view(batch, length, 3, HEADS, dim // HEADS).permute(2, 0, 3, 1, 4)
        query, key, value = heads
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, length, dim))
        hidden: Tensor = self.narrow(functional.gelu(self.wide(self.norm_2(x))))
        return x + hidden


class GPT(nn.Module):
    """Predicts the next byte."""

    def __init__(self, dim: int, layers: int, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.position = nn.Embedding(context, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        self.apply(_initialize)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of batches of bytes."""
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean cross entropy of each byte after the first."""
        return functional.cross_entropy(self(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


class MasterAdamW(torch.optim.Optimizer):
    """AdamW for bfloat16 weights that are casts of float32 masters, which it keeps next to the moments."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01})

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update the masters, and cast them."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, group)
        return None

    def _update(self, weight: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if not state:
            master = weight.detach().float().clone()
            state |= {"step": torch.tensor(0.0), "master": master}
            state |= {"exp_avg": torch.zeros_like(master), "exp_avg_sq": torch.zeros_like(master)}
        grad, (beta_1, beta_2) = weight.grad.float(), group["betas"]  # type: ignore[union-attr]
        state["step"] += 1
        state["exp_avg"].lerp_(grad, 1 - beta_1)
        state["exp_avg_sq"].mul_(beta_2).addcmul_(grad, grad, value=1 - beta_2)
        steps = float(state["step"])
        scale = (state["exp_avg_sq"] / (1 - beta_2**steps)).sqrt_().add_(group["eps"])
        state["master"].mul_(1 - group["lr"] * group["weight_decay"])
        state["master"].addcdiv_(state["exp_avg"], scale, value=-group["lr"] / (1 - beta_1**steps))
        weight.copy_(state["master"])
