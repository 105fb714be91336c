"""Checksums that see every change, and receivers that verify what they take."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_core.errors import WeightsError
from relax_core.torch.device_sums import DeviceSums, tensor_sums
from relax_core.weight_sums import Sums, checksum, checksums
from relax_core.weights import TensorInfo, offsets, verify, views

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
    words: list[int] = np.frombuffer(data + b"\0" * (-len(data) % 8), dtype="<u8").tolist()
    rows = [sum(words[i : i + 512]) for i in range(0, len(words), 512)]
    lanes = [sum(words[i::512]) for i in range(512)]
    return positions(rows) << 64 | positions(lanes)


def positions(sums: list[int]) -> int:
    low, high = [s % 2**32 for s in sums], [s % 2**64 >> 32 for s in sums]
    return (
        sum((2 * k + 1) * (a + 0x9E3779B97F4A7C15 * b) for k, (a, b) in enumerate(zip(low, high, strict=True))) % 2**64
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 3, 64, 65, 1000, 70_001])
def test_the_checksum_is_the_written_sum(dtype: torch.dtype, count: int) -> None:
    tensor = random_bits(dtype, count)
    assert checksum(tensor) == by_definition(tensor)


def test_extreme_words_do_not_overflow_the_arithmetic() -> None:
    for word in (-(2**63), 2**63 - 1, -1):
        tensor = torch.full((100_000,), word, dtype=torch.int64)
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


@pytest.mark.parametrize("first", [0, 1, 1023])
@pytest.mark.parametrize("distance", [2, 1024, 1 << 19, (1 << 19) + 2])
def test_words_that_differ_in_the_top_bit_alone(first: int, distance: int) -> None:
    """A plain weighted sum modulo 2**64 would see none of these: twice anything times 2**63 is 0."""
    tensor = torch.zeros(1 << 20, dtype=torch.int32)
    tensor[first] = -(2**31)
    assert checksum(tensor) != checksum(tensor.roll(distance)) != 0


def test_a_buffer_that_fills_in_pieces_of_any_size_has_the_same_sums() -> None:
    sizes = [3, 1000, 1 << 16, 70_000, 0, 5]
    infos = [TensorInfo(str(i), (n,), "float32", 0) for i, n in enumerate(sizes)]
    starts = offsets(infos)
    buffer = random_bits(torch.uint8, starts[-1])
    whole = checksums(buffer, starts)
    for piece in (1 << 10, 4097, 1 << 18, 300_000):
        sums = Sums(buffer, starts)
        for upto in range(0, starts[-1], piece):
            sums.advance(upto)
        sums.advance(starts[-1])
        assert sums.found == whole


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
    assert all(start % 4096 == 0 for start in starts)
    buffer = torch.zeros(starts[-1], dtype=torch.uint8)
    for tensor, target in zip(tensors, views(buffer, infos, starts), strict=True):
        target.copy_(tensor)
    assert checksums(buffer, starts) == [checksum(t) for t in tensors]
    assert DeviceSums(buffer, starts).found == tensor_sums(tensors) == checksums(buffer, starts)  # as a GPU does it


def test_verify_names_tensor_expected_and_found() -> None:
    tensor = torch.arange(6.0).view(2, 3)
    info = TensorInfo("model.w", (2, 3), "float32", checksum(tensor))
    verify(info, tensor)
    with pytest.raises(WeightsError, match=r"weights model.w: shape \(3, 2\), the manifest says \(2, 3\)"):
        verify(info, tensor.t())
    with pytest.raises(WeightsError, match=r"weights model.w: dtype bfloat16, the manifest says float32"):
        verify(info, tensor.bfloat16())
    with pytest.raises(WeightsError, match=rf"weights model.w: checksum \w+, the manifest says {info.checksum:032x}"):
        verify(info, tensor + 1)
