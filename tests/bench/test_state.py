"""The state that is measured is a trained one, of the size and precision that was asked for."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import pytest
import torch

from bench.gpt import MasterAdamW
from bench.state import BYTES_PER_PARAMETER, SMALL, Kind, batch, sources, trained

SIZE = 4_000_000


@pytest.fixture(scope="module", autouse=True)
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SMALL, "1")
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.mark.parametrize("kind", ["fp32", "bf16", "mixed"])
def test_it_has_the_size_that_was_asked_for(kind: Kind) -> None:
    state = trained(kind, SIZE)
    parameters = sum(weight.numel() for weight in state.model.parameters())
    assert abs(state.num_bytes - SIZE) < 0.2 * SIZE
    assert abs(state.num_bytes / parameters - BYTES_PER_PARAMETER[kind]) < 0.01


def test_it_is_the_same_each_time_and_no_two_matrices_are_equal() -> None:
    one, other = trained("fp32", SIZE), trained("fp32", SIZE)
    assert one.digest() == other.digest()
    matrices = [tensor for tensor in one.tensors().values() if tensor.numel() > 1000]
    assert not any(torch.equal(a, b) for a, b in combinations(matrices, 2) if a.shape == b.shape)


def test_mixed_weights_are_the_casts_of_their_masters_also_after_a_step() -> None:
    state = trained("mixed", SIZE)
    assert isinstance(state.optim, MasterAdamW)
    before = state.digest()
    state.model.loss(batch(sources(), 1, 8)).backward()  # type: ignore[no-untyped-call]
    state.optim.step()
    assert state.digest() != before
    for weight in state.model.parameters():
        assert torch.equal(weight, state.optim.state[weight]["master"].bfloat16())


def test_a_state_that_forgot_its_numbers_is_another_one() -> None:
    state = trained("bf16", SIZE)
    before = state.digest()
    state.forget()
    assert state.digest() != before
