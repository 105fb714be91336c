"""The feed: prompts in training order, made ahead by threads within bounds; bad and long rows treated by rule."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Literal

import numpy as np
import pytest

from relax_core.config.schema import DataSection
from relax_core.content_hash import content_hash
from relax_core.errors import ConfigError, DataError
from relax_core.feed import Feed
from relax_core.interfaces import ComponentConfig, Environment
from relax_core.media import MediaStore
from relax_core.prompts import Prompt, Prompts
from relax_core.tasks import TaskStream
from relax_core.types import Encoded, MediaRef, Message, Task, user

pytestmark = pytest.mark.timeout(20)

BYTES = 4_000
"""Of the features of each medium."""


class Rows(Environment):
    """``size`` rows; those for which ``bad`` holds raise."""

    def __init__(self, size: int, bad: Callable[[int], bool] = lambda i: False) -> None:
        super().__init__(ComponentConfig())
        self.size, self.bad = size, bad
        self.asked: list[int] = []

    def tasks(self, split: Literal["train", "eval"]) -> Sequence[Task]:
        return self  # type: ignore[return-value]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> Task:
        self.asked.append(i)
        if self.bad(i):
            raise DataError(f"file:{i + 1}: no 'answer'")
        return Task(str(i), (user(" ".join(["word"] * (i + 1))),))


class Words:
    """Stands for an adapter: a token for each word, and one medium a prompt."""

    def __init__(self, store: MediaStore) -> None:
        self.media = store
        self.work: Callable[[str], None] = lambda text: None

    def encode(self, history: Sequence[Message]) -> Encoded:
        text = " ".join(message.text for message in history)
        self.work(text)
        key = self.media.features(f"of {text}", lambda: {"x": np.zeros(BYTES, np.uint8)})
        return Encoded([1] * len(text.split()), (MediaRef("image", key, 0, 1),))


def feed(environment: Rows, groups: int = 4, **settings: Any) -> Feed:
    section = DataSection.model_validate_json(json.dumps({"max_bad_fraction": 0.9, **settings}))
    adapter: Any = Words(MediaStore({}, section.media_bytes))
    stream = TaskStream({"rows": (environment, 1.0)}, seed=0)
    return Feed(stream, Prompts(adapter, section), section, groups, note=lambda line: None)


def using(made: Feed, work: Callable[[Feed], Coroutine[Any, Any, Any]]) -> Any:
    async def main() -> Any:
        try:
            return await work(made)
        finally:
            made.close()

    return asyncio.run(main())


async def ids(made: Feed, count: int, start: int = 0) -> list[str]:
    found: list[Prompt] = [await made.take(i) for i in range(start, start + count)]
    for prompt in found:
        made.media.release(prompt.keys)
    return [prompt.task.id for prompt in found]


# --- order ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 4])
def test_prompts_come_in_the_order_of_the_stream(workers: int) -> None:
    found = using(feed(Rows(10), workers=workers, ahead=7), lambda made: ids(made, 25))
    stream = TaskStream({"rows": (Rows(10), 1.0)}, seed=0)
    assert found == [stream.task(stream.candidate("rows", i)).id for i in range(25)]


@pytest.mark.parametrize("workers", [1, 3])
def test_bad_rows_are_passed_over_and_counted_once(workers: int) -> None:
    environment = Rows(12, lambda i: i % 3 == 0)
    made = feed(environment, workers=workers)
    found = using(made, lambda m: ids(m, 24))
    assert len(found) == len(set(found)) == 24
    assert {int(id.split("/")[1].split("#")[0]) % 3 for id in found} == {1, 2}
    assert made.bad.counts() == {"rows": 4}
    assert [line["reason"] for line in made.bad.lines()] == [f"file:{i}: no 'answer'" for i in (1, 4, 7, 10)]
    # of three epochs: a bad row is read again only by who was ahead before it was known
    assert all(environment.asked.count(i) <= 2 for i in range(0, 12, 3))


def test_a_position_may_be_asked_for_again() -> None:
    async def work(made: Feed) -> None:
        first = await ids(made, 9)
        assert await ids(made, 9) == first
        assert await ids(made, 3, start=9) != first[:3]

    using(feed(Rows(8, lambda i: i in (2, 5))), work)


def test_a_resumed_feed_goes_on_as_the_first_would_have() -> None:
    def rows() -> Rows:
        return Rows(9, lambda i: i in (1, 4, 8))

    whole = using(feed(rows()), lambda made: ids(made, 40))
    first = feed(rows())
    using(first, lambda made: ids(made, 17))
    state = json.loads(json.dumps(first.state()))
    second = feed(rows())
    second.restore(state, 17)

    async def rest(made: Feed) -> list[str]:
        again = await ids(made, 5, start=12)  # in flight when it was killed
        assert again == whole[12:17]
        return await ids(made, 23, start=17)

    assert using(second, rest) == whole[17:]
    assert second.bad.counts() == {"rows": 3}


# --- limits -----------------------------------------------------------------------------------------------------------


def test_too_many_bad_rows_end_the_run() -> None:
    made = feed(Rows(20, lambda i: i % 2 == 0), max_bad_fraction=0.1)
    with pytest.raises(
        DataError, match=r"environments\.rows: file:\d+: no 'answer' \(and 2 more\): 3 of 20 rows are bad"
    ):
        using(made, lambda m: ids(m, 20))


def test_no_good_row_at_all_ends_the_run() -> None:
    with pytest.raises(DataError, match="rows are bad"):
        using(feed(Rows(4, lambda i: True)), lambda m: ids(m, 1))


def test_a_few_bad_rows_of_many_are_no_reason_to_stop_early() -> None:
    """The first row is bad: 1 of 1 looked at, but of 5,000 rows one in ten may be."""
    made = feed(Rows(5000, lambda i: i % 20 == 0), max_bad_fraction=0.1)
    assert len(using(made, lambda m: ids(m, 300))) == 300
    assert 0 < made.bad.counts()["rows"] < 40


def test_other_errors_than_of_data_pass_through() -> None:
    class Broken(Rows):
        def __getitem__(self, i: int) -> Task:
            raise KeyError("a fault of the environment")

    with pytest.raises(KeyError, match="a fault"):
        using(feed(Broken(3)), lambda m: ids(m, 1))


def test_a_held_out_task_ends_the_run() -> None:
    made = feed(Rows(10))
    made.hold_out({content_hash(Rows(10)[3])}, "held-out")
    with pytest.raises(
        ConfigError, match=r"environments\.rows: training task 'rows/3#0' is also in evaluation 'held-out'"
    ):
        using(made, lambda m: ids(m, 10))


# --- prompts that are too long ----------------------------------------------------------------------------------------


def test_a_long_prompt_is_an_error_by_default() -> None:
    with pytest.raises(ConfigError, match=r"has \d+ tokens, data\.max_prompt_tokens allows 6: .*long_prompts"):
        using(feed(Rows(10), max_prompt_tokens=6), lambda m: ids(m, 10))


def test_long_prompts_may_be_left_out() -> None:
    made = feed(Rows(10), max_prompt_tokens=6, long_prompts="skip")
    found = using(made, lambda m: ids(m, 12))
    assert {int(id.split("/")[1].split("#")[0]) for id in found} == set(range(6))
    assert made.counts["too_long"] >= 4 and not made.bad.counts()


def test_none_that_fits_is_an_error() -> None:
    environment = Rows(5)
    environment.__class__ = type("Long", (Rows,), {"__getitem__": lambda self, i: Task(str(i), (user("a b c d"),))})
    with pytest.raises(DataError, match="and no other row of 'rows' can be used"):
        using(feed(environment, max_prompt_tokens=3, long_prompts="skip"), lambda m: ids(m, 1))


# --- working ahead ----------------------------------------------------------------------------------------------------


def test_it_works_ahead_with_all_its_threads() -> None:
    together = threading.Barrier(3)
    made = feed(Rows(50), workers=3, ahead=6)
    adapter: Any = made.prompts.adapter

    async def work(m: Feed) -> None:
        await ids(m, 1)
        adapter.work = lambda text: together.wait(timeout=10) and None  # passes only if three are at work at once
        await asyncio.sleep(0)
        await ids(m, 6, start=1)

    using(made, work)


def test_it_does_not_work_further_ahead_than_allowed() -> None:
    environment = Rows(100)

    async def work(made: Feed) -> None:
        await ids(made, 1)
        await asyncio.sleep(0.3)
        assert len(environment.asked) == 1 + 5
        await ids(made, 2, start=1)
        await asyncio.sleep(0.3)
        assert len(environment.asked) == 3 + 5

    using(feed(environment, workers=2, ahead=5), work)


def test_it_does_not_hold_more_bytes_than_allowed() -> None:
    environment = Rows(100)

    async def work(made: Feed) -> None:
        await ids(made, 1)
        await asyncio.sleep(0.3)
        ready = len(environment.asked) - 1
        assert 3 * BYTES <= ready * BYTES <= 4 * BYTES  # half of the room, and what was at work when it was full
        await ids(made, 20, start=1)

    using(feed(environment, workers=1, ahead=50, media_bytes=6 * BYTES), work)


def test_media_of_a_prompt_stay_until_they_are_released() -> None:
    async def work(made: Feed) -> None:
        prompts = [await made.take(i) for i in range(8)]  # far more than the store keeps by itself
        for prompt in prompts:
            assert made.media.get(prompt.keys[0])["x"].nbytes == BYTES
            made.media.release(prompt.keys)
        await asyncio.sleep(0.2)
        assert made.media.nbytes <= 2 * BYTES + 5 * BYTES  # its bound, and what is made ahead

    using(feed(Rows(100), media_bytes=2 * BYTES, ahead=4, workers=2), work)


def test_the_loop_goes_on_while_a_prompt_is_made() -> None:
    made = feed(Rows(4), workers=1)
    adapter: Any = made.prompts.adapter
    adapter.work = lambda text: time.sleep(0.3)

    async def work(m: Feed) -> int:
        waiting = asyncio.ensure_future(ids(m, 1))
        ticks = 0
        while not waiting.done():
            await asyncio.sleep(0.01)
            ticks += 1
        return ticks

    assert using(made, work) > 10
    assert not [t for t in threading.enumerate() if t.name.startswith("feed")]
