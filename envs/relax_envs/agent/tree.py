"""What was said in a play, as a tree of replies: finds how much of a request's conversation is known already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from relax_core.types import Message, Text, ToolCall

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Node(Generic[T]):
    """A reply, and what was said to get it. The root is a reply to nothing."""

    said: tuple[Message, ...]
    """Since the reply before."""
    reply: Message
    """As the client got it: text without calls, and the calls."""
    depth: int
    """How many replies lead here, this one included."""
    where: T
    after: list[Node[T]] = field(default_factory=list)


class Tree(Generic[T]):
    """``root`` says where a conversation begins."""

    def __init__(self, root: T) -> None:
        self.root: Node[T] = Node((), Message("assistant", ()), 0, root)

    def add(self, before: Node[T], said: Sequence[Message], reply: Message, where: T) -> None:
        before.after.append(Node(tuple(said), reply, before.depth + 1, where))

    def find(self, messages: Sequence[Message]) -> tuple[Node[T], tuple[Message, ...]]:
        """The last reply of the longest beginning of ``messages`` that is known, and what is said after it.

        Where equal replies were given to equal words, the one whose call ids are meant, then one that nobody went on
        from, then the newest.
        """
        messages = tuple(messages)
        best, best_rank = self.root, (0, True, not self.root.after)
        open_ends = [(self.root, 0, True)]
        while open_ends:
            node, n, exact = open_ends.pop()
            if (rank := (n, exact, not node.after)) > best_rank:
                best, best_rank = node, rank
            for child in node.after:  # the newest is looked at first
                end = n + len(child.said)
                if len(messages) > end and messages[n:end] == child.said and same(child.reply, messages[end]):
                    agree = exact and _ids(child.reply) == _ids(messages[end])
                    open_ends.append((child, end + 1, agree))
        return best, messages[best_rank[0] :]


def same(given: Message, said: Message) -> bool:
    """Whether an assistant's message is a reply that was given: ids, and white space around its text, do not matter."""
    return said.role == "assistant" and given.text.strip() == said.text.strip() and _calls(given) == _calls(said)


def _calls(m: Message) -> list[tuple[str, object]]:
    return [(part.name, dict(part.arguments)) for part in m.parts if isinstance(part, ToolCall)]


def _ids(m: Message) -> list[str]:
    return [part.id for part in m.parts if isinstance(part, ToolCall)]


def reply_message(text: str, calls: Sequence[ToolCall]) -> Message:
    """A reply as a client gets it."""
    return Message("assistant", (*([Text(text)] if text else []), *calls))
