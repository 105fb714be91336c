"""An environment: its tasks, and how one is played."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field
from relax_core.interfaces import ComponentConfig, Environment
from relax_core.types import Task, user

if TYPE_CHECKING:
    from relax_core.chat import Chat


class Echo(Environment):
    """Say the word that was said; one hint after a wrong answer."""

    class Config(ComponentConfig):
        words: tuple[str, ...] = ("cat", "dog", "sun", "tree")
        """Words to repeat; the last one is held out for evaluation."""
        hints: Annotated[int, Field(ge=0)] = 1
        """Corrections given after wrong answers."""

    def tasks(self, split: Literal["train", "eval"]) -> Sequence[Task]:
        words = self.config.words[:-1] if split == "train" else self.config.words[-1:]
        return [Task(id=word, messages=(user(f"word {word} ?"),), answer=word) for word in words]

    async def play(self, task: Task, chat: Chat) -> None:
        reply = await chat(*task.messages)
        for _ in range(self.config.hints):
            if reply.text == task.answer:
                return
            reply = await chat(f"word {task.answer} ?")
