"""The number of parameters of a model, from its architecture or from a Hugging Face config.json. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import msgspec

from ckptstore.codecs.dtypes import ITEM_BYTES
from ckptstore.errors import InvalidRequest
from ckptstore.format.decoding import convert, decode_json
from ckptstore.values import Record, Value

_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
_Some = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


class Model(Record):
    """The number of parameters, and where it comes from."""

    parameters: int
    expert_parameters: int = 0
    """Parameters of experts, which expert parallelism distributes; included in `parameters`."""
    source: str = "given"


class Architecture(Record):
    """A decoder-only transformer. Norms, biases and rotary tables are not counted: they are below 0.1 %."""

    layers: _Count
    hidden: _Count
    ffn: _Count
    heads: _Count
    kv_heads: _Count | None = None
    """None: as many as heads."""
    vocab: _Count
    head_dim: _Count | None = None
    """None: hidden / heads."""
    tied: bool = False
    """The output layer is the embedding."""
    mlp_matrices: int = 3
    """3: gated (SwiGLU). 2: up and down."""
    positions: _Some = 0
    """Learned position embeddings."""
    experts: _Some = 0
    """Experts per layer; 0: dense."""
    expert_ffn: _Some = 0
    """Width of an expert."""
    shared_ffn: _Some = 0
    """Width of the perceptron that all tokens of a layer with experts pass."""
    dense_layers: _Some = 0
    """Layers without experts in a model with experts."""

    def model(self, source: str = "architecture") -> Model:
        """P = L(2h² + 2h·kv·h/n + 3hf) + 2Vh for a gated, untied, dense model.

        Source: MLPerf Storage, Submission_guidelines.md, whose four models it reproduces.
        """
        h, head_dim = self.hidden, self.head_dim or self.hidden / self.heads
        attention = 2 * h * head_dim * (self.heads + (self.kv_heads or self.heads))
        moe_layers = self.layers - self.dense_layers if self.experts else 0
        dense = (self.layers - moe_layers) * self.mlp_matrices * h * self.ffn
        shared = moe_layers * h * (self.mlp_matrices * self.shared_ffn + self.experts)  # and the router
        experts = moe_layers * self.experts * self.mlp_matrices * h * self.expert_ffn
        embeddings = (1 if self.tied else 2) * self.vocab * h + self.positions * h
        total = round(self.layers * attention) + dense + shared + experts + embeddings
        return Model(parameters=total, expert_parameters=experts, source=source)


def _llama(hidden: int, ffn: int, heads: int, kv_heads: int, layers: int) -> Architecture:
    return Architecture(hidden=hidden, ffn=ffn, heads=heads, kv_heads=kv_heads, layers=layers, vocab=128_256)


MODELS = {
    "mlperf-8b": _llama(4096, 14336, 32, 8, 32),
    "mlperf-70b": _llama(8192, 28672, 128, 8, 80),
    "mlperf-405b": _llama(16384, 53248, 128, 8, 126),
    "mlperf-1t": _llama(25872, 98304, 192, 32, 128),
}
"""The models of MLPerf Storage v2.0 and v3.0 (Submission_guidelines.md, table 2; llama3_*.yaml)."""


def named_model(name: str) -> Model:
    """One of MODELS. Raises InvalidRequest."""
    if name not in MODELS:
        raise InvalidRequest(f"there is no model {name!r}", f"Models: {', '.join(MODELS)}")
    return MODELS[name].model(name)


class _Config(Value):
    """The fields of a config.json that matter, by all names that model families use for them."""

    model_type: str = ""
    hidden_size: _Count | None = None
    n_embd: _Count | None = None
    num_hidden_layers: _Count | None = None
    n_layer: _Count | None = None
    num_attention_heads: _Count | None = None
    n_head: _Count | None = None
    num_key_value_heads: _Count | None = None
    head_dim: _Count | None = None
    intermediate_size: _Count | None = None
    n_inner: _Count | None = None
    vocab_size: _Count | None = None
    n_positions: _Count | None = None
    tie_word_embeddings: bool | None = None
    num_local_experts: _Some | None = None
    num_experts: _Some | None = None
    n_routed_experts: _Some | None = None
    n_shared_experts: _Some | None = None
    moe_intermediate_size: _Count | None = None
    shared_expert_intermediate_size: _Some | None = None
    first_k_dense_replace: _Some | None = None
    kv_lora_rank: int | None = None
    text_config: dict[str, Any] | None = None


_TWO_MATRICES = {"gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "falcon", "phi", "starcoder2"}
_TIED = {"gpt2", "gemma", "gemma2", "gemma3_text", "opt", "bloom", "falcon"}
"""Families whose embeddings are tied unless the configuration has another value."""


def from_config(data: bytes, name: str) -> Model:
    """The model of a Hugging Face config.json. name: for messages. Raises InvalidRequest."""
    try:
        config = decode_json(data, _Config)
        if config.text_config is not None and config.hidden_size is None:
            config = convert(config.text_config, _Config)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"{name} is not a config.json of a model: {error}", "Give --parameters instead") from error
    if config.kv_lora_rank:
        raise InvalidRequest(
            f"{name} describes multi-head latent attention, which is not supported", "Give --parameters"
        )
    return _architecture(config, name).model(name)


def _architecture(config: _Config, name: str) -> Architecture:
    hidden = config.hidden_size or config.n_embd
    layers, heads = config.num_hidden_layers or config.n_layer, config.num_attention_heads or config.n_head
    if hidden is None or layers is None or heads is None or config.vocab_size is None:
        raise InvalidRequest(
            f"{name} lacks hidden_size, num_hidden_layers, num_attention_heads or vocab_size", "Give --parameters"
        )
    ffn = config.intermediate_size or config.n_inner or 4 * hidden
    expert_ffn = config.moe_intermediate_size or ffn
    shared_ffn = config.shared_expert_intermediate_size or (config.n_shared_experts or 0) * expert_ffn
    tied = config.tie_word_embeddings
    return Architecture(
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        ffn=ffn,
        vocab=config.vocab_size,
        tied=config.model_type in _TIED if tied is None else tied,
        mlp_matrices=2 if config.model_type in _TWO_MATRICES else 3,
        positions=(config.n_positions or 0) if config.model_type == "gpt2" else 0,
        experts=config.num_local_experts or config.num_experts or config.n_routed_experts or 0,
        expert_ffn=expert_ffn,
        shared_ffn=shared_ffn,
        dense_layers=config.first_k_dense_replace or 0,
    )


SHORT_NAMES = {
    "fp64": "float64",
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp8": "float8_e4m3fn",
}
COMPRESSED = {"float32": 0.835, "bfloat16": 0.67, "float16": 0.85}
"""Stored share of trained weights and moments under `compress="fast"` (docs/decisions/0016). Other types: 1."""


_OPTIMIZERS: dict[str, tuple[str, ...]] = {
    "adamw": ("momentum", "variance"),
    "adam": ("momentum", "variance"),
    "lion": ("momentum",),
    "muon": ("momentum",),
    "sgd-momentum": ("momentum",),
    "sgd": (),
    "none": (),
}
"""The state that optimizers keep for each parameter."""


class Term(Record):
    """One kind of state, and its bytes per parameter in a checkpoint."""

    name: str
    """weights, master, momentum, variance, grads or other."""
    dtype: str
    """Element type; empty: not stored, or of several types."""
    bytes_per_parameter: float
    compressed: float = 1.0
    """Stored share."""


def state_terms(optimizer: str, weights: str, master: str | None, moments: str, grads: str | None) -> tuple[Term, ...]:
    """All five terms; one that is not stored has 0 bytes. The other names are element types; short ones are allowed.

    master None: float32 beside 16-bit weights, else none. "none": none. grads None: not saved. Raises InvalidRequest.
    """
    if optimizer not in _OPTIMIZERS:
        raise InvalidRequest(f"there is no optimizer {optimizer!r}", f"Use {', '.join(_OPTIMIZERS)}")
    kept, of_weights = _OPTIMIZERS[optimizer], dtype_named(weights)
    if master is None:
        master = "float32" if ITEM_BYTES[of_weights] < 4 and optimizer != "none" else "none"
    return (
        _term("weights", of_weights),
        _term("master", "" if master == "none" else dtype_named(master)),
        *(_term(name, dtype_named(moments) if name in kept else "") for name in ("momentum", "variance")),
        _term("grads", dtype_named(grads) if grads else ""),
    )


def per_parameter(terms: Iterable[Term]) -> float:
    """Bytes of all terms."""
    return sum(term.bytes_per_parameter for term in terms)


def derivable(terms: Iterable[Term]) -> frozenset[str]:
    """The terms that dedup_casts leaves out: 16-bit weights that are casts of float32 masters."""
    dtypes = {term.name: term.dtype for term in terms}
    casts = dtypes.get("weights") in ("bfloat16", "float16") and dtypes.get("master") == "float32"
    return frozenset({"weights"}) if casts else frozenset()


def dtype_named(name: str) -> str:
    """The element type of a name such as bf16 or bfloat16. Raises InvalidRequest."""
    found = SHORT_NAMES.get(name, name)
    if found not in ITEM_BYTES:
        raise InvalidRequest(f"{name!r} is not an element type", f"Use {', '.join(SHORT_NAMES)} or torch's names")
    return found


def _term(name: str, dtype: str) -> Term:
    size = ITEM_BYTES[dtype] if dtype else 0
    return Term(name=name, dtype=dtype, bytes_per_parameter=float(size), compressed=COMPRESSED.get(dtype, 1.0))
