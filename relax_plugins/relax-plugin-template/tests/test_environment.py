from __future__ import annotations

from relax_core.testing import check_environment, play

from relax_plugin_template.environment import Echo

ECHO = Echo(Echo.Config())


def test_it_keeps_the_promises_of_an_environment() -> None:
    check_environment(ECHO)


def test_a_wrong_answer_gets_a_hint() -> None:
    task = ECHO.tasks("train")[0]
    right, wrong = str(task.answer), "something else"
    assert [turn.reply.text for turn in play(ECHO, task, [right]).turns] == [right]
    corrected = play(ECHO, task, [wrong, right])
    assert [message.text for message in corrected.turns[1].prompt] == [f"word {right} ?"]
    assert len(play(ECHO, task, [wrong, wrong]).turns) == 2, "one hint, and no more"
