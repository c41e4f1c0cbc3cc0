"""vLLM serves training checkpoints: what it computes is what transformers computes with the same weights."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

import ckpt
from ckptstore.errors import CkptError, CorruptObject, InvalidName, InvalidRequest, NoCheckpoint
from ckptstore.stores import open_store
from tests.support.checkpoints import flip
from tests.support.daemons import caching_daemon
from tests.support.ports import free_port

PROMPT = [5, 17, 200, 3, 99, 42, 7]
NEW = 8
SIZES = {"vocab_size": 256, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
KILLS = 20
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 128}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 64}
MODELS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=2, **SIZES)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(intermediate_size=256, tie_word_embeddings=True, **LAYERS, **SIZES)),
    "moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**EXPERTS, **LAYERS, **SIZES)),
}


def model_of(kind: str, seed: int) -> Any:
    """Weights large enough that each changes the logits by far more than rounding does."""
    torch.manual_seed(seed)
    model = MODELS[kind]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The configuration of each model, as vLLM's `--model`: without weights."""
    found = {kind: tmp_path_factory.mktemp(kind) for kind in MODELS}
    for kind, folder in found.items():
        model = MODELS[kind]()
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
    return found


def save(store: Path, run: str, model: nn.Module, step: int = 1, compress: Any = "off") -> None:
    with ckpt.Checkpointer(str(store), run=run, compress=compress, writer="thread") as checkpointer:
        checkpointer.save(model, None, step)


def save_from_two_ranks(store: Path, run: str, model: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    command = [sys.executable, "-m", "tests.engines.save_shards", str(folder), str(store), run]
    ranks = [subprocess.Popen(command, env={**os.environ, **place, "RANK": str(rank)}) for rank in range(2)]
    assert [rank.wait(120) for rank in ranks] == [0, 0]


@contextmanager
def serving(folder: Path, checkpoint: str | None, **options: Any) -> Iterator[LLM]:
    named = {} if checkpoint is None else {"checkpoint": checkpoint}
    try:
        yield LLM(
            str(folder), load_format="ckptd", model_loader_extra_config=named, skip_tokenizer_init=True,
            dtype="float32", enforce_eager=True, max_model_len=32, max_num_seqs=1, max_logprobs=-1,
            enable_prefix_caching=False, weight_transfer_config={"backend": "ckptd"}, **options,
        )  # fmt: skip
    finally:
        gc.collect()
        cleanup_dist_env_and_memory()


def answers(llm: LLM) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens, and the logarithms of all probabilities after each token of the prompt."""
    asked = SamplingParams(temperature=0, max_tokens=NEW, prompt_logprobs=-1, ignore_eos=True, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": PROMPT}], asked, use_tqdm=False)
    rows = [[row[token].logprob for token in range(256)] for row in output.prompt_logprobs[1:]]
    return list(output.outputs[0].token_ids), torch.tensor(rows)


def expected(model: Any) -> tuple[list[int], torch.Tensor]:
    """The same of transformers."""
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        logits = model(ids).logits[0, :-1]
        tokens = model.generate(ids, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)[0, len(PROMPT) :].tolist()
    return tokens, torch.log_softmax(logits, -1)


def agree(one: tuple[list[int], torch.Tensor], other: tuple[list[int], torch.Tensor]) -> bool:
    return one[0] == other[0] and torch.allclose(one[1], other[1], atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "how", "by_daemon"),
    [
        ("gpt2", "raw", False),
        ("gpt2", "float-split", True),
        ("llama", "raw", True),
        ("llama", "two ranks", False),
        ("moe", "float-split", False),
    ],
)
def test_what_is_served_is_what_was_trained(
    kind: str, how: str, by_daemon: bool, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, store = model_of(kind, 1), tmp_path / "store"
    if how == "two ranks":
        save_from_two_ranks(store, "team/run", model, tmp_path / "hf")
    else:
        save(store, "team/run", model, compress={"raw": "off", "float-split": "max"}[how])
    opened = open_store(str(store))
    with caching_daemon(opened, tmp_path) if by_daemon else nullcontext() as url:
        monkeypatch.setenv("CKPTD_URL" if by_daemon else "CKPT_STORE", url or str(store))
        with serving(folders[kind], "team/run@latest") as llm:
            assert agree(answers(llm), expected(model))
    assert not list(opened.list("team~run/leases/")), "a lease is left"


def test_damage_is_an_error(folders: dict[str, Path], tmp_path: Path) -> None:
    save(tmp_path, "gpt", model_of("gpt2", 1))
    (shard,) = tmp_path.rglob("*.ckpt")
    flip(shard)
    with (
        pytest.raises(CorruptObject, match="does not match its checksum"),
        serving(folders["gpt2"], f"{tmp_path}/gpt@1"),
    ):
        pass


@pytest.mark.parametrize(
    ("checkpoint", "error", "words"),
    [
        ("gpt@2", NoCheckpoint, "run 'gpt' has no checkpoint at step 2"),
        ("gtp@1", NoCheckpoint, "Did you mean run 'gpt'"),
        ("gpt", InvalidName, "'gpt' is not a checkpoint id"),
        (None, InvalidRequest, "needs a checkpoint"),
    ],
)
def test_names_of_nothing(
    checkpoint: str | None, error: type[CkptError], words: str,
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    save(tmp_path, "gpt", model_of("gpt2", 1))
    monkeypatch.setenv("CKPT_STORE", str(tmp_path))
    with pytest.raises(error, match=words), serving(folders["gpt2"], checkpoint):
        pass


class Updates:
    """A running engine, the models whose checkpoints it can take by step, and its store, which may fail."""

    def __init__(self, llm: LLM, store: Path, models: dict[int, Any]) -> None:
        self.llm, self.store = llm, store
        self.expected = {step: expected(model) for step, model in models.items()}

    @property
    def engine(self) -> Any:
        return self.llm.llm_engine.model_executor.driver_worker.worker.weight_transfer_engine

    def read(self, checkpoint: str) -> list[str]:
        """The first half of an update; returns the names of what was read."""
        self.llm.start_weight_update()
        self.llm.update_weights({"update_info": {"checkpoint": checkpoint}})
        return [name for name, _ in self.engine._read[1]]

    def to(self, step: int) -> None:
        self.read(f"gpt@{step}")
        self.llm.finish_weight_update()

    def serves(self, step: int) -> bool:
        return agree(answers(self.llm), self.expected[step])


CHANGED = {
    "gpt2": "transformer.h.1.mlp.c_fc.weight",
    "llama": "model.layers.1.mlp.up_proj.weight",
    "moe": "model.layers.1.mlp.experts.down_proj",
}


@pytest.fixture
def updates(
    request: pytest.FixtureRequest, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Updates]:
    """Of Llama, unless the test is parametrised, indirectly, over the models. Steps 2 and 3 differ in one tensor."""
    kind = getattr(request, "param", "llama")
    models = {1: model_of(kind, 1), 2: model_of(kind, 2), 3: model_of(kind, 2)}
    with torch.no_grad():
        models[3].get_parameter(CHANGED[kind]).mul_(-1)
    for step, model in models.items():
        save(tmp_path, "gpt", model, step)
    save(tmp_path, "other", MODELS["gpt2"]())
    monkeypatch.setenv("CKPT_STORE", str(tmp_path))
    with serving(folders[kind], "gpt@1") as llm:
        yield Updates(llm, tmp_path, models)


@pytest.mark.parametrize("updates", MODELS, indirect=True)
def test_an_update_reads_what_changed(updates: Updates) -> None:
    assert updates.serves(1)
    updates.to(2)
    assert updates.serves(2)
    names = updates.read("gpt@3")
    (changed,) = set(CHANGED.values()).intersection(names)
    layer = changed[: changed.index("mlp")]
    assert all(name.startswith(layer) for name in names), "vLLM takes a layer as a whole, and no other"
    assert updates.serves(2), "weights change when an update is finished"
    updates.llm.finish_weight_update()
    assert updates.serves(3)
    assert updates.read("gpt@3") == []
    updates.llm.finish_weight_update()
    assert updates.serves(3)
    updates.to(1)
    assert updates.serves(1)


def test_an_update_that_cannot_be_read_changes_nothing(updates: Updates) -> None:
    attempt = max(updates.store.glob("gpt/attempts/*-000000000003-*"))
    flip(next(attempt.glob("*.ckpt")))
    for checkpoint, error in (("gpt@9", NoCheckpoint), ("other@1", InvalidRequest), ("gpt@3", CorruptObject)):
        with pytest.raises(error):
            updates.read(checkpoint)
        assert updates.serves(1)
    updates.to(2)
    assert updates.serves(2)


class Killed(BaseException):
    """What a test raises at a line of the product."""


@contextmanager
def killed_at(line: int) -> Iterator[list[int]]:
    """Raise Killed in place of the n-th line of the product that this thread visits. Yields the count of lines."""
    product, count = str(Path(ckpt.__file__).parents[1]), [0]

    def trace(frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(product):
            return None
        if event == "line":
            count[0] += 1
            if count[0] - 1 == line:
                raise Killed
        return trace

    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(None)


def test_an_update_killed_at_any_moment_changes_nothing(updates: Updates) -> None:
    with killed_at(-1) as lines:
        updates.read("gpt@2")
    updates.llm.finish_weight_update()
    updates.to(1)
    for line in random.Random(36).sample(range(lines[0]), KILLS):
        with pytest.raises(Killed), killed_at(line):
            updates.read("gpt@2")
        assert updates.serves(1), line
    updates.to(2)
    assert updates.serves(2)


def test_a_worker_whose_weights_are_a_mixture_ends(updates: Updates, monkeypatch: pytest.MonkeyPatch) -> None:
    load = updates.engine.model.load_weights
    updates.read("gpt@2")
    monkeypatch.setattr(updates.engine.model, "load_weights", lambda tensors: load(interrupted(tensors)))
    with pytest.raises(SystemExit, match="mixture"):
        updates.llm.finish_weight_update()


def interrupted(tensors: list[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    yield from tensors[:5]
    raise KeyboardInterrupt
