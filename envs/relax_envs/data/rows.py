"""From a row of data to a Task. Reads no file, but looks whether media are there and fetches those behind addresses."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relax_core.errors import nearest
from relax_core.types import Message, Task, Text
from relax_envs.data.columns import Columns
from relax_envs.data.fetch import Fetcher
from relax_envs.data.mapping import Fields, Mapper
from relax_envs.data.media import Media
from relax_envs.data.messages import messages_of, text_parts
from relax_envs.data.values import RowError, is_well_formed


class TaskMaker:
    """Makes tasks of the rows of a data set. ``media_root``: where relative paths begin, if not beside the file."""

    def __init__(
        self,
        columns: Columns,
        media_root: Path | None = None,
        urls: bool | tuple[str, ...] = False,
        need_answer: bool = True,
    ) -> None:
        self.mapper = Mapper(columns)
        self.media_root, self.need_answer = media_root, need_answer
        self._fetcher = Fetcher(urls)

    def task(self, row: Mapping[str, Any], folder: Path, id: str) -> Task:
        """The task of a row in a file of a folder. Raises RowError."""
        fields = self.mapper.fields(dict(row))
        media = Media(fields.media, self.media_root or folder, self._fetcher)
        messages = self._messages(fields, media)
        messages = self._last_reply(messages, fields)
        if fields.answer is None and self.need_answer:
            column = self.mapper.columns.answer or "answer"
            found = f"no 'answer'{'' if column == 'answer' else f' in {column!r}'}"
            raise RowError(f"{found}{nearest(column, fields.metadata)} (need_answer: false allows it)")
        if not is_well_formed(id):
            raise RowError("'id' holds half of a surrogate pair, which is no character")
        return Task(id, tuple(messages), fields.answer, fields.metadata)

    def _messages(self, fields: Fields, media: Media) -> list[Message]:
        first = (
            [] if fields.system is None else [Message("system", tuple(text_parts(fields.system, "'system'", media)))]
        )
        if isinstance(fields.talk, str) and fields.talk_name == "prompt":
            messages = [Message("user", tuple(text_parts(fields.talk, "'prompt'", media)))]
        else:
            messages = messages_of(fields.talk, fields.talk_name, media)
        if first and any(m.role == "system" for m in messages):
            raise RowError("'system' is given, and the messages have a system message of their own: leave one out")
        media.check()
        for i, m in enumerate(messages, 1):
            if not m.parts:
                raise RowError(f"message {i}: 'content' is empty")
        return first + messages

    def _last_reply(self, messages: list[Message], fields: Fields) -> list[Message]:
        """The messages without a reply at their end, which becomes the answer where the settings say so."""
        rule = self.mapper.columns.last_reply
        if messages[-1].role != "assistant":
            return messages
        if rule == "error":
            raise RowError(
                "the last message is the assistant's: nothing is asked; put the right reply into 'answer', or set "
                "columns.last_reply: answer (or drop)"
            )
        if rule == "answer":
            if fields.answer is not None:
                raise RowError("the last message is the assistant's, and there is an 'answer': set last_reply: drop")
            if not all(isinstance(p, Text) for p in messages[-1].parts):
                raise RowError("the last message is the assistant's and not just text: it cannot be the answer")
            fields.answer = messages[-1].text
        if len(messages) == 1:
            raise RowError("the only message is the assistant's: nothing is asked")
        return messages[:-1]


def task_of(row: Mapping[str, Any], folder: Path, id: str, need_answer: bool = True) -> Task:
    """The task of a row whose columns have the usual names; media paths are relative to ``folder``.

    Values that are null, NaN or empty count as missing; columns with other names become metadata. Raises RowError.
    """
    return TaskMaker(Columns(), need_answer=need_answer).task(row, folder, id)


def row_id(row: Mapping[str, Any], number: int) -> str:
    """The row's own ``id``, else the number of its line. Raises RowError."""
    return Mapper(Columns()).id(row) or str(number)
