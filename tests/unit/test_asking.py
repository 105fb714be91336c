"""An engine that rewards ask: in a pool of its own, in batches that no timing changes, and without a trace behind."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from relax_core.asking import Answer, Asker, Question
from relax_core.errors import EngineError
from relax_core.testing.engines import decoder_of, pending, request, serving, until, update, watched
from relax_core.torch.engine import TorchEngine
from relax_core.types import Sampling, Stop, user

FEW = Sampling(1.0, 6)


def question(text: str, draw: int = 0, sampling: Sampling = FEW) -> Question:
    return Question((user(text),), sampling, text, draw)


def asker(e: TorchEngine, deterministic: bool = False) -> Asker:
    return Asker(e, e.setup.adapter, 3, deterministic)


async def texts(a: Asker, questions: Sequence[Question], at_once: int = 8) -> list[str]:
    found = await a.ask(questions, at_once=at_once, deadline=20)
    assert all(isinstance(one, Answer) for one in found), found
    return [one.text for one in found if isinstance(one, Answer)]


def test_what_is_asked_alone_decides_the_answer() -> None:
    async def main(e: TorchEngine) -> None:
        a = asker(e)
        questions = [question("red"), question("red", 1), question("green"), question("blue")]
        found = await texts(a, questions)
        assert found == list(reversed(await texts(a, questions[::-1], at_once=1))) and len(set(found)) > 2
        (answer,) = await a.ask([question("red")], at_once=1, deadline=20)
        assert answer == Answer(found[0], Stop.LENGTH, 0) and await a.version() == 0
        await e.load_weights(update(e))
        (answer,) = await a.ask([question("red")], at_once=1, deadline=20)
        assert isinstance(answer, Answer) and answer.version == 1 == await a.version()

    serving(main)


def test_the_version_is_waited_for_while_engines_are_started_again() -> None:
    async def main(e: TorchEngine) -> None:
        answers: list[dict[str, float]] = [{"serving": 0.0}, {"serving": 0.0}, {"version": 7.0}]

        async def health() -> dict[str, float]:
            return answers.pop(0)

        e.health = health  # type: ignore[method-assign]
        assert await asker(e).version() == 7 and not answers

    serving(main)


def test_the_questions_of_one_call_are_one_batch() -> None:
    """Of a deterministic engine, while its plays wait for somebody who is still at work."""

    async def main(e: TorchEngine) -> None:
        e.enter("train")
        e.enter("train")
        (play,) = pending(e, [request("play", [1, 2])])
        a = asker(e, deterministic=True)
        calls = [texts(a, [question("red", i), question("red", i + 3), question("red", i + 6)]) for i in range(3)]
        await asyncio.gather(*calls)
        assert set(watched(e).sizes) == {1, 3} and not play.done()  # the prompt is read once for all three
        e.leave("train")
        await play
        assert e._entered == {"train": 1, "eval": 0, "reward": 0}

    serving(main, deterministic=True)


def test_at_most_so_many_at_once() -> None:
    async def main(e: TorchEngine) -> None:
        for deterministic in (False, True):
            watched(e).sizes.clear()
            await texts(asker(e, deterministic), [question(f"red {i}") for i in range(7)], at_once=3)
            assert max(watched(e).sizes) == 3

    serving(main)


def test_errors_stand_in_their_places() -> None:
    async def main(e: TorchEngine) -> None:
        empty = Question((user(""),), FEW, "empty")
        long = question("blue", sampling=Sampling(1.0, 10**6))
        first, second, third, fourth = await asker(e).ask(
            [question("red"), empty, long, question("green")], at_once=8, deadline=20
        )
        assert isinstance(first, Answer) and isinstance(fourth, Answer)
        assert isinstance(second, EngineError) and "its prompt is empty" in str(second)
        assert isinstance(third, EngineError) and "model's positions" in str(third)

    serving(main)


def test_what_is_late_or_given_up_leaves_nothing_behind() -> None:
    async def main(e: TorchEngine) -> None:
        await e.pause()
        a = asker(e, deterministic=True)
        (late,) = await a.ask([question("red")], at_once=1, deadline=0.05)
        assert isinstance(late, TimeoutError)
        asking = asyncio.create_task(a.ask([question("red"), question("blue")], at_once=1, deadline=20))
        waiting = asyncio.create_task(a.ask([question("green")], at_once=1, deadline=20))
        await until(lambda: decoder_of(e).waiting("reward") == 1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await e.resume()
        assert isinstance((await waiting)[0], Answer)
        assert e._entered["reward"] == 0 == e._pending["reward"]

    serving(main, deterministic=True)


def test_an_engine_that_sleeps_meanwhile_goes_on_where_it_was() -> None:
    """Its sleep aborts what is running; the answer is the one that nobody interrupted."""

    async def main(e: TorchEngine) -> None:
        a = asker(e)
        undisturbed = await texts(a, [question("red", sampling=Sampling(1.0, 40))])
        asking = asyncio.create_task(texts(a, [question("red", sampling=Sampling(1.0, 40))]))
        await until(lambda: decoder_of(e).running("reward") == 1)
        await e.sleep()
        await asyncio.sleep(0.05)
        assert not asking.done()
        await e.wake()
        assert await asking == undisturbed

    serving(main)
