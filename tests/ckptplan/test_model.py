from __future__ import annotations

import json
from typing import Any

import pytest

from ckptplan.model import (
    MODELS,
    Architecture,
    derivable,
    from_config,
    named_model,
    per_parameter,
    state_terms,
)
from ckptstore.errors import InvalidRequest

GPT2: dict[str, Any] = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}


@pytest.mark.parametrize(
    ("name", "parameters", "gib"),
    [
        ("mlperf-8b", 8.030e9, 104.70), ("mlperf-70b", 6.98813e10, 911.15), ("mlperf-405b", 4.05849e11, 5291.67),
        ("mlperf-1t", 1.18319e12, 15427.01),
    ],
)  # fmt: skip
def test_the_models_and_checkpoints_of_mlperf(name: str, parameters: float, gib: float) -> None:
    assert len(MODELS) == 4
    assert named_model(name).parameters == pytest.approx(parameters, rel=1e-5)
    terms = state_terms("adamw", "bf16", None, "fp32", None)
    assert round(named_model(name).parameters * per_parameter(terms) / 2**30, 2) == gib


def test_unknown_models_and_types_name_the_known_ones() -> None:
    with pytest.raises(InvalidRequest, match="mlperf-8b"):
        named_model("mlperf-9b")
    with pytest.raises(InvalidRequest, match="bf16"):
        state_terms("adamw", "bf17", None, "fp32", None)


def published(config: dict[str, Any]) -> int:
    return from_config(json.dumps(config).encode(), "config.json").parameters


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        pytest.param(
            {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
             "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False},
            8_030_261_248, id="Llama-3.1-8B",
        ),
        pytest.param(
            {"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
             "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192, "vocab_size": 128256,
             "tie_word_embeddings": True},
            1_235_814_400, id="Llama-3.2-1B",
        ),
        pytest.param(GPT2 | {"n_positions": 1024}, 124_439_808, id="GPT-2"),
        pytest.param(
            {"model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
             "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000, "num_local_experts": 8,
             "tie_word_embeddings": False},
            46_702_792_704, id="Mixtral-8x7B",
        ),
        pytest.param(
            {"model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
             "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768,
             "num_experts": 128, "vocab_size": 151936, "tie_word_embeddings": False},
            30_532_122_624, id="Qwen3-30B-A3B",
        ),
    ],
)  # fmt: skip
def test_configs_give_the_published_numbers_but_for_norms_and_biases(config: dict[str, Any], parameters: int) -> None:
    assert published(config) == pytest.approx(parameters, rel=0.001)
    assert published(config) < parameters


def test_a_multimodal_configuration_has_its_language_model_below() -> None:
    assert published({"model_type": "multimodal", "text_config": GPT2}) == published(GPT2)


def test_experts_are_counted_apart() -> None:
    dense: dict[str, Any] = {"layers": 10, "hidden": 64, "ffn": 256, "heads": 4, "vocab": 1000}
    model = Architecture(**dense, experts=8, expert_ffn=32, shared_ffn=64, dense_layers=2).model()
    assert model.expert_parameters == 8 * 8 * 3 * 64 * 32
    others = 10 * 4 * 64 * 64 + 2 * 3 * 64 * 256 + 8 * 64 * (3 * 64 + 8) + 2 * 1000 * 64
    assert model.parameters == model.expert_parameters + others
    assert Architecture(**dense).model().expert_parameters == 0


@pytest.mark.parametrize(
    "data",
    [
        b"", b"[]", b"{}", b"\xff", b"[" * 100_000, json.dumps(GPT2 | {"n_layer": -1}).encode(),
        json.dumps(GPT2 | {"n_embd": "768"}).encode(), json.dumps(GPT2 | {"kv_lora_rank": 512}).encode(),
        json.dumps({"text_config": {"text_config": {}}}).encode(),
    ],
)  # fmt: skip
def test_other_files_are_refused_with_a_way_out(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match="--parameters"):
        from_config(data, "config.json")


@pytest.mark.parametrize(
    ("optimizer", "weights", "master", "moments", "grads", "expected"),
    [
        ("adamw", "bf16", None, "fp32", None, [2, 4, 4, 4, 0]),
        ("adamw", "fp32", None, "fp32", None, [4, 0, 4, 4, 0]),
        ("adamw", "bf16", "none", "fp32", None, [2, 0, 4, 4, 0]),
        ("adamw", "bf16", "none", "bf16", None, [2, 0, 2, 2, 0]),
        ("adamw", "bf16", None, "fp32", "bf16", [2, 4, 4, 4, 2]),
        ("adamw", "fp8", None, "float32", None, [1, 4, 4, 4, 0]),
        ("lion", "fp16", "fp32", "fp32", None, [2, 4, 4, 0, 0]),
        ("sgd", "fp32", None, "fp32", None, [4, 0, 0, 0, 0]),
        ("none", "bf16", None, "fp32", None, [2, 0, 0, 0, 0]),
    ],
)
def test_each_term_is_counted(
    optimizer: str, weights: str, master: str | None, moments: str, grads: str | None, expected: list[float]
) -> None:
    terms = state_terms(optimizer, weights, master, moments, grads)
    assert [term.name for term in terms] == ["weights", "master", "momentum", "variance", "grads"]
    assert [term.bytes_per_parameter for term in terms] == expected


def test_casts_of_masters_need_not_be_stored_and_compression_is_near_its_entropy() -> None:
    terms = state_terms("adamw", "bf16", None, "fp32", None)
    assert derivable(terms) == {"weights"}
    assert derivable(state_terms("adamw", "bf16", "none", "fp32", None)) == set()
    assert derivable(state_terms("adamw", "fp32", None, "fp32", None)) == set()
    assert sum(term.bytes_per_parameter * term.compressed for term in terms) == pytest.approx(11.30, rel=0.01)
