"""Keyed randomness: golden numbers, scalar and vector alike, and no order, state or key that leaks into another."""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_core import keys
from relax_core.types import DrawKey

WORDS = st.integers(0, 2**64 - 1)


def test_bits_are_splitmix64() -> None:
    """The first outputs of the reference implementation for seeds 0 and 1234567."""
    assert [keys.bits(0, i) for i in range(3)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert [keys.bits(1234567, i) for i in range(5)] == expected


def test_a_stream_is_the_hash_of_its_key() -> None:
    text = "\x1f".join(["7", "sample", "colour/3#0", "1", "2", "0"])
    expected = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
    assert keys.draw_stream(7, DrawKey("colour/3#0", 1, 2, 0)) == expected
    assert keys.stream(7, "order", "colour", 3) == 14960644207783073997


def test_golden_draws() -> None:
    """These numbers are in every journal and every resumed run: they may never change."""
    start = keys.draw_stream(0, DrawKey("text/n12#0", 0, 3, 0))
    assert start == 8403124004289040322
    assert [keys.uniform(start, i) for i in range(3)] == [0.9535379047339876, 0.5220270674589627, 0.17485569322248395]
    assert keys.generator(0, "order", "text", 0).permutation(8).tolist() == [2, 7, 3, 4, 6, 5, 1, 0]


@settings(max_examples=200, derandomize=True)
@given(pairs=st.lists(st.tuples(WORDS, st.integers(0, 2**63)), min_size=1, max_size=50))
def test_vector_and_scalar_agree_bit_for_bit(pairs: list[tuple[int, int]]) -> None:
    starts = np.array([start for start, _ in pairs], np.uint64)
    positions = np.array([position for _, position in pairs], np.uint64)
    found = keys.uniforms(starts, positions)
    assert found.dtype == np.float64
    assert found.tolist() == [keys.uniform(start, position) for start, position in pairs]


def test_vectors_broadcast() -> None:
    starts = np.array([[1], [2**64 - 1]], np.uint64)
    positions = np.arange(4, dtype=np.uint64)
    found = keys.uniforms(starts, positions)
    assert found.shape == (2, 4)
    assert found[1].tolist() == [keys.uniform(2**64 - 1, i) for i in range(4)]


@given(start=WORDS, position=st.integers(0, 2**63))
@settings(max_examples=200, derandomize=True)
def test_uniform_is_in_the_half_open_interval(start: int, position: int) -> None:
    u = keys.uniform(start, position)
    assert 0.0 <= u < 1.0
    assert u * 2**53 == int(u * 2**53)


def test_draws_do_not_depend_on_other_draws() -> None:
    """In whichever order, and however often: there is no state."""
    start = keys.draw_stream(3, DrawKey("t", 0, 0, 0))
    forwards = [keys.uniform(start, i) for i in range(20)]
    other = keys.draw_stream(3, DrawKey("t", 0, 1, 0))
    backwards = []
    for i in reversed(range(20)):
        keys.uniform(other, i)
        keys.generator(3, "t").random()
        backwards.append(keys.uniform(start, i))
    assert backwards[::-1] == forwards


def test_every_part_of_the_key_counts() -> None:
    seeds, tasks, attempts, members, turns = (0, 1), ("a", "b", "1"), (0, 1, 11), (0, 1, 11), (0, 1, 11)
    found = [
        keys.draw_stream(seed, DrawKey(task, attempt, member, turn))
        for seed, task, attempt, member, turn in itertools.product(seeds, tasks, attempts, members, turns)
    ]
    assert len(set(found)) == len(found) == 2 * 3**4
    # parts are kept apart: a digit cannot move from one into the next
    assert keys.stream(0, "a", 1, 11) != keys.stream(0, "a", 11, 1)
    assert keys.stream(0, "ab", "c") != keys.stream(0, "a", "bc")
    assert keys.stream(1, "1") != keys.stream(11, "")


def test_draws_are_uniform_and_unrelated() -> None:
    """20,000 draws, as a run makes them: many short streams of similar keys. The limits are 5 standard deviations."""
    streams = np.array(
        [keys.draw_stream(0, DrawKey(f"t/{i}", 0, m, 0)) for i in range(250) for m in range(8)], np.uint64
    )
    u = keys.uniforms(streams[:, None], np.arange(10, dtype=np.uint64)[None])
    n = u.size
    counts = np.bincount((u * 20).astype(int).ravel(), minlength=20)
    chi2 = float(((counts - n / 20) ** 2 / (n / 20)).sum())
    assert chi2 < 19 + 5 * np.sqrt(2 * 19)
    assert abs(u.mean() - 0.5) < 5 * np.sqrt(1 / 12 / n)
    for a, b in ((u[:, :-1], u[:, 1:]), (u[:-1], u[1:])):  # neighbours in a stream, and neighbouring members
        correlation = float(np.corrcoef(a.ravel(), b.ravel())[0, 1])
        assert abs(correlation) < 5 / np.sqrt(a.size)


def test_generators_of_different_keys_differ_and_of_one_key_agree() -> None:
    first, again, other = (keys.generator(5, *key).random(4).tolist() for key in (("a", 1), ("a", 1), ("a", 2)))
    assert first == again != other
