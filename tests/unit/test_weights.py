"""Checksums that see every change, and receivers that verify what they take."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_core.errors import WeightsError
from relax_core.weights import TensorInfo, checksum, checksums, offsets, verify, view

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.uint8,
]


def random_bits(dtype: torch.dtype, count: int, seed: int = 0) -> torch.Tensor:
    """Every bit pattern, NaNs and denormals included."""
    data = np.random.default_rng(seed).integers(0, 256, count * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(data).view(dtype)


def by_definition(tensor: torch.Tensor) -> int:
    """The formula in Python's whole numbers."""
    data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    words: list[int] = np.frombuffer(data + b"\0" * (-len(data) % 4), dtype="<i4").tolist()
    return sum((2 * i + 1) * word for i, word in enumerate(words)) % 2**64


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 3, 64, 65, 1000, 70_001])
def test_the_checksum_is_the_written_sum(dtype: torch.dtype, count: int) -> None:
    tensor = random_bits(dtype, count)
    assert checksum(tensor) == by_definition(tensor)


def test_extreme_words_do_not_overflow_the_arithmetic() -> None:
    for word in (-(2**31), 2**31 - 1, -1):
        tensor = torch.full((100_000,), word, dtype=torch.int32)
        assert checksum(tensor) == by_definition(tensor)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(DTYPES), st.integers(1, 400), st.integers(0, 10**6), st.data())
def test_any_flipped_bit_changes_it(dtype: torch.dtype, count: int, seed: int, data: st.DataObject) -> None:
    tensor = random_bits(dtype, count, seed)
    changed = tensor.clone()
    position = data.draw(st.integers(0, tensor.nbytes - 1))
    changed.view(torch.uint8)[position] ^= 1 << data.draw(st.integers(0, 7))
    assert checksum(changed) != checksum(tensor)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([d for d in DTYPES if d.itemsize <= 4]), st.integers(2, 400), st.integers(0, 10**6), st.data())
def test_swapping_unequal_elements_changes_it(dtype: torch.dtype, count: int, seed: int, data: st.DataObject) -> None:
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
    tensor = random_bits(dtype, count, seed).view(bits)
    a, b = data.draw(st.integers(0, count - 1)), data.draw(st.integers(0, count - 1))
    swapped = tensor.clone()
    swapped[a], swapped[b] = tensor[b], tensor[a]
    assert (checksum(swapped.view(dtype)) != checksum(tensor.view(dtype))) == (int(tensor[a]) != int(tensor[b]))


def test_far_apart_words_that_differ_in_the_top_bit_alone() -> None:
    tensor = torch.zeros(1 << 20, dtype=torch.int32)
    tensor[0] = -(2**31)
    swapped = tensor.roll(1 << 19)
    assert checksum(tensor) != checksum(swapped) != 0


def test_equal_bits_of_other_dtypes_and_layouts_have_equal_checksums() -> None:
    tensor = random_bits(torch.float32, 600).view(20, 30)
    assert checksum(tensor) == checksum(tensor.view(torch.int32)) == checksum(tensor.flatten())
    assert checksum(tensor.t()) == checksum(tensor.t().contiguous()) != checksum(tensor)
    assert checksum(tensor.flatten()[3:]) == checksum(tensor.flatten()[3:].clone())  # not aligned
    assert checksum(torch.tensor(1.5)) == by_definition(torch.tensor([1.5]))
    assert checksum(torch.zeros(0)) == 0


def test_many_tensors_of_a_buffer_are_summed_at_once() -> None:
    tensors = [random_bits(dtype, 17 * (i + 1), i) for i, dtype in enumerate(DTYPES)] + [torch.zeros(0)]
    infos = [TensorInfo(str(i), tuple(t.shape), str(t.dtype)[6:], 0) for i, t in enumerate(tensors)]
    starts = offsets(infos)
    assert all(start % 256 == 0 for start in starts)
    buffer = torch.zeros(starts[-1], dtype=torch.uint8)
    for tensor, info, start in zip(tensors, infos, starts, strict=False):
        view(buffer, start, info.shape, info.dtype).copy_(tensor)
    assert checksums(buffer, starts) == [checksum(t) for t in tensors]


def test_verify_names_tensor_expected_and_found() -> None:
    tensor = torch.arange(6.0).view(2, 3)
    info = TensorInfo("model.w", (2, 3), "float32", checksum(tensor))
    verify(info, tensor)
    with pytest.raises(WeightsError, match=r"weights model.w: shape \(3, 2\), the manifest says \(2, 3\)"):
        verify(info, tensor.t())
    with pytest.raises(WeightsError, match=r"weights model.w: dtype bfloat16, the manifest says float32"):
        verify(info, tensor.bfloat16())
    with pytest.raises(WeightsError, match=rf"weights model.w: checksum \w+, the manifest says {info.checksum:016x}"):
        verify(info, tensor + 1)
