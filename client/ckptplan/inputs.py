"""The inputs of a plan: one flat set of named values, the same in Python and as options of ckptctl. Pure."""

from __future__ import annotations

from math import isfinite
from typing import Annotated

from ckptplan import training
from ckptplan.layout import Layout, Sharding
from ckptplan.model import Architecture, Model, Term, named_model, state_terms
from ckptplan.training import PRESETS
from ckptstore.errors import InvalidRequest
from ckptstore.format.records import Policy, about
from ckptstore.values import Record


class PlanInputs(Record):
    """The inputs of `make_plan`. Seconds, bytes and bytes per second, unless the name of a field has another unit."""

    model: Annotated[Model | str | None, about("A model: mlperf-8b, mlperf-70b, mlperf-405b or mlperf-1t.")] = None
    parameters: Annotated[float | None, about("Number of parameters, such as 70e9.", "count")] = None
    expert_parameters: Annotated[float, about("Parameters of experts, included in --parameters.", "count")] = 0
    layers: Annotated[int | None, about("Layers of a transformer; with the next six, instead of --parameters.")] = None
    hidden: Annotated[int | None, about("Hidden size.")] = None
    ffn: Annotated[int | None, about("Intermediate size of the perceptron.")] = None
    heads: Annotated[int | None, about("Attention heads.")] = None
    kv_heads: Annotated[int | None, about("Key-value heads; default: --heads.")] = None
    vocab: Annotated[int | None, about("Size of the vocabulary.")] = None
    tied: Annotated[bool, about("The output layer shares the weights of the embedding.")] = False

    optimizer: Annotated[str, about("adamw, adam, lion, muon, sgd-momentum, sgd or none.")] = "adamw"
    weights: Annotated[str, about("Type of the weights: bf16, fp16, fp32, fp8 or a name of torch.")] = "bf16"
    master: Annotated[
        str | None, about("Type of master weights, or none; default: fp32 beside weights below 32 bits.")
    ] = None
    moments: Annotated[str, about("Type of the optimizer's moments.")] = "fp32"
    grads: Annotated[str | None, about("Type of gradients, if they are saved (save_async(grads=True)).")] = None
    compress: Annotated[bool, about("Compress, as compress='fast' does.")] = True
    dedup_casts: Annotated[bool, about("Do not store weights that are casts of their masters.")] = False
    terms: tuple[Term, ...] | None = None
    """Measured bytes per parameter, instead of optimizer, weights, master, moments and grads."""

    dp: Annotated[int | None, about("Data-parallel degree, sharded or not; default: nodes × processes / (tp·pp).")] = (
        None
    )
    tp: Annotated[int, about("Tensor-parallel degree.")] = 1
    pp: Annotated[int, about("Pipeline-parallel degree.")] = 1
    ep: Annotated[int, about("Expert-parallel degree, within the data-parallel ranks.")] = 1
    sharding: Annotated[
        str, about("The state that data-parallel ranks distribute: ddp, zero1, zero2, zero3 or fsdp.")
    ] = "ddp"
    replicas: Annotated[int, about("Copies of the sharded state (hybrid sharding).")] = 1
    split_replicas: Annotated[bool, about("Replicas share the writing of what all of them hold.")] = False
    nodes: Annotated[int | None, about("Number of nodes; default: world size / processes.")] = None
    processes: Annotated[int, about("Processes (ranks) per node.")] = 8
    slots: Annotated[int, about("Snapshots in host memory at the same time.")] = 2

    window_s: Annotated[float | None, about("Time that a save may take until it is durable.", "s")] = None
    interval_s: Annotated[float | None, about("Time from save to save; default: the best one.", "s")] = None
    bandwidth: Annotated[float | None, about("Write bandwidth of the store for all writers, per second.", "bytes")] = (
        None
    )
    read_bandwidth: Annotated[
        float | None, about("Read bandwidth of the store for all readers; default: --bandwidth.", "bytes")
    ] = None
    rank_bandwidth: Annotated[float | None, about("Most that one rank writes, per second.", "bytes")] = None
    rank_read_bandwidth: Annotated[
        float | None, about("Most that one rank reads, per second; default: --rank-bandwidth.", "bytes")
    ] = None
    copy_bandwidth: Annotated[
        float, about("Copy to host memory per rank, for the stall if it is not given.", "bytes", default="10GB")
    ] = 10e9

    local_replicas: Annotated[
        int | None, about("Other nodes that get each shard of a local tier; default: there is no local tier.")
    ] = None
    disk_bandwidth: Annotated[float, about("The local tier of one node, per second.", "bytes", default="2GB")] = 2e9
    network_bandwidth: Annotated[float, about("From node to node, per second.", "bytes", default="10GB")] = 10e9

    mtbf_s: Annotated[float | None, about("Mean time between failures of the whole job.", "s")] = None
    failure_rate: Annotated[float | None, about("Failures per 1000 node-days, instead of --mtbf.")] = None
    failures: Annotated[str | None, about("A published failure rate: rsc-1, rsc-2, llama3 or mlcommons.")] = None
    restart_s: Annotated[float, about("From a failure to the next step: scheduling, imports, restore.", "s")] = 0.0
    stall_s: Annotated[float | None, about("Time that one save holds up training.", "s")] = None
    slowdown_s: Annotated[float, about("The slowdown of steps during one save, in total.", "s")] = 0.0
    durable_s: Annotated[float | None, about("From the capture until a save is durable.", "s")] = None
    measured: frozenset[str] = frozenset()
    """The names of inputs that are measurements of a run."""

    steps: Annotated[int | None, about("Optimizer steps of the run; or --samples.")] = None
    samples: Annotated[int | None, about("Samples per epoch.")] = None
    epochs: Annotated[float, about("Epochs.")] = 1.0
    global_batch: Annotated[int | None, about("Samples per optimizer step; or --micro-batch.")] = None
    micro_batch: Annotated[int | None, about("Samples per process and pass.")] = None
    accumulation: Annotated[int, about("Micro-batches per optimizer step (gradient accumulation).")] = 1
    step_s: Annotated[float | None, about("Duration of an optimizer step.", "s")] = None

    keep: Policy | None = None
    """Retention rules; None: everything is kept."""
    price: Annotated[float | None, about("Price of a GB-month (10^9 bytes), in any currency.")] = None

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, int | float) and not isinstance(value, bool) and (not isfinite(value) or value < 0):
                raise InvalidRequest(f"{name} {value} is not a number from 0 on", "Correct or leave it out")
        for name in _POSITIVE:
            if getattr(self, name) == 0:
                raise InvalidRequest(f"{name} is 0", "Give a positive number, or leave it out")

    def origin(self, name: str) -> str:
        """Whether an input is given or measured."""
        return "measured" if name in self.measured else "given"

    def counted(self) -> Model:
        """The model. Raises InvalidRequest if it is not given, or given twice."""
        shape = {name: getattr(self, name) for name in ("layers", "hidden", "ffn", "heads", "vocab")}
        given = [self.model is not None, self.parameters is not None, any(shape.values())]
        if sum(given) != 1:
            problem = "several models are given" if any(given) else "no model is given"
            raise InvalidRequest(
                problem,
                "Give one of --parameters, --model, --layers with --hidden, --config, --safetensors, --from or a "
                "checkpoint",
            )
        if isinstance(self.model, Model):
            return self.model
        if self.model is not None:
            return named_model(self.model)
        if self.parameters is not None:
            return _given(self.parameters, self.expert_parameters)
        missing = [name for name, value in shape.items() if not value]
        if missing:
            raise InvalidRequest(f"{', '.join(missing)} are missing", "Give all of --layers, --hidden, --ffn, ...")
        return Architecture(**shape, kv_heads=self.kv_heads, tied=self.tied).model()

    def state(self) -> tuple[Term, ...]:
        """The bytes per parameter. Raises InvalidRequest for an unknown optimizer or element type."""
        if self.terms is not None:
            return self.terms
        return state_terms(self.optimizer, self.weights, self.master, self.moments, self.grads)

    def layout(self) -> Layout:
        """The layout. Raises InvalidRequest if the degrees do not match."""
        dp = self.dp
        if dp is None:
            ranks = (self.nodes or 1) * (self.processes if self.nodes else 1)
            if ranks % (self.tp * self.pp) and self.nodes:
                raise InvalidRequest(f"{ranks} ranks are not a multiple of tp·pp = {self.tp * self.pp}", "Give --dp")
            dp = max(1, ranks // (self.tp * self.pp))
        if self.sharding not in [*Sharding]:
            raise InvalidRequest(f"there is no sharding {self.sharding!r}", f"Use {', '.join(Sharding)}")
        return Layout(
            dp=dp,
            tp=self.tp,
            pp=self.pp,
            ep=self.ep,
            sharding=Sharding(self.sharding),
            replicas=self.replicas,
            split_replicas=self.split_replicas,
            processes=self.processes,
        )

    def mtbf(self, nodes: int) -> tuple[float | None, str]:
        """The mean time between failures, and its source. Raises InvalidRequest if it is given twice."""
        given = [value for value in (self.mtbf_s, self.failure_rate, self.failures) if value is not None]
        if len(given) > 1:
            raise InvalidRequest("the failure rate is given twice", "Give one of --mtbf, --failure-rate, --failures")
        if self.mtbf_s is not None:
            return self.mtbf_s, "given"
        if self.failure_rate is not None:
            return training.mtbf(nodes, self.failure_rate), f"{self.failure_rate:g} per 1000 node-days"
        if self.failures is None:
            return None, ""
        if self.failures not in PRESETS:
            raise InvalidRequest(f"unknown failure rate {self.failures!r}", f"Rates: {', '.join(PRESETS)}")
        rate = PRESETS[self.failures]
        return training.mtbf(nodes, rate.per_1000_node_days), rate.source

    def batch(self, data_parallel: int) -> int | None:
        """Samples per optimizer step; None if not given. Raises InvalidRequest if it is given twice."""
        if self.global_batch is not None and self.micro_batch is not None:
            raise InvalidRequest("the batch is given twice", "Give --global-batch or --micro-batch")
        if self.micro_batch is None:
            return self.global_batch
        return training.global_batch(self.accumulation, data_parallel, self.micro_batch)

    def num_steps(self, batch: int | None) -> int | None:
        """Optimizer steps of the run; None if not given. Raises InvalidRequest if they are given twice."""
        if self.steps is not None and self.samples is not None:
            raise InvalidRequest("the length of the run is given twice", "Give --steps or --samples")
        if self.samples is None:
            return self.steps
        if batch is None:
            raise InvalidRequest("--samples needs a batch", "Give --global-batch or --micro-batch")
        return training.num_steps(self.samples, batch, self.epochs)


_POSITIVE = (
    "parameters", "window_s", "interval_s", "bandwidth", "read_bandwidth", "rank_bandwidth", "copy_bandwidth",
    "rank_read_bandwidth", "mtbf_s", "failure_rate", "step_s", "processes", "nodes", "epochs",
)  # fmt: skip


def _given(parameters: float, experts: float) -> Model:
    if experts > parameters:
        raise InvalidRequest("experts have more parameters than the model", "--parameters includes them")
    short = f"{parameters / 1e9:.4g}B" if parameters >= 1e9 else f"{parameters / 1e6:.4g}M"
    return Model(parameters=round(parameters), expert_parameters=round(experts), source=short)
