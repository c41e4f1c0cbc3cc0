"""Elements in memory by strides: only those that are there."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.foreign.archive import Storage, StridedTensor


@pytest.mark.parametrize(
    ("memory", "shape", "strides", "offset"),
    [
        (b"", (2,), (1,), 0), (b"", (), (), 0), (bytes(4), (1,), (1,), 1), (bytes(8), (2,), (2,), 0),
        (bytes(8), (2, 2), (1, 1), 0), (bytes(8), (2,), (-1,), 1), (bytes(8), (1,), (1,), -1),
        (bytes(7), (2,), (1,), 0),
    ],
)  # fmt: skip
def test_elements_outside_memory(memory: bytes, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> None:
    with pytest.raises(ValueError, match="outside"):
        StridedTensor(Storage(memoryview(memory)), torch.int32, shape, strides, offset).reader()


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
@settings(max_examples=60, deadline=None)
def test_any_view_reads_like_its_contiguous_copy(shape: list[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    cut = data.draw(st.integers(0, shape[0] - 1))
    base = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).reshape(shape)
    view = base[cut:].permute(order)
    expected = bytes(view.contiguous().reshape(-1).view(torch.uint8).numpy())
    low = data.draw(st.integers(0, view.numel() - 1)) * 4
    high = data.draw(st.integers(low // 4 + 1, view.numel())) * 4
    buffer, storage = bytearray(high - low), Storage(memoryview(base.numpy().tobytes()))
    tensor = StridedTensor(storage, view.dtype, view.shape, view.stride(), int(view.storage_offset()))
    tensor.reader()(low, memoryview(buffer))
    assert bytes(buffer) == expected[low:high]


@pytest.mark.parametrize("dtype", [torch.int16, torch.bfloat16, torch.float64, torch.complex64, torch.uint8])
def test_big_endian_numbers_and_signs_are_resolved(dtype: torch.dtype) -> None:
    tensor = torch.arange(1, 7).to(dtype) * (1 + 2j if dtype.is_complex else 1)
    size = dtype.itemsize // (2 if dtype.is_complex else 1)
    little = bytes(tensor.view(torch.uint8).numpy())
    big = b"".join(little[i : i + size][::-1] for i in range(0, len(little), size))
    signed = dtype.is_complex or dtype.is_floating_point
    found = StridedTensor(
        Storage(memoryview(big), swapped=True), dtype, (6,), (1,), conjugated=dtype.is_complex, negated=signed
    )
    buffer = bytearray(len(little))
    found.reader()(0, memoryview(buffer))
    expected = (-tensor).conj().resolve_conj() if signed else tensor
    assert bytes(buffer) == bytes(expected.contiguous().view(torch.uint8).numpy())
