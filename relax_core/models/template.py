"""Messages to tokens through a chat template, and what comes between two samplings, always tokenised in context.

The template is the only authority on format: nothing here knows ChatML or any other. What it renders must not change
what was sampled; where it would, ``extend`` says so (Rewritten) and the caller starts a new sample.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from relax_core.errors import ConfigError, DataError
from relax_core.interfaces import Rewritten
from relax_core.types import Audio, Image, Message, Part, Text, ToolCall, ToolResult, ToolSpec, Video

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


_WRITTEN = ("assistant", "tool")
"""Roles of what a model wrote, or may have made a tool write: its special tokens are defused, not refused, or it could
end a play that goes badly as an error, which is not trained."""


class ChatTemplate:
    """A tokenizer's chat template. ``source`` replaces it; ``options`` are variables for it.

    ``stop_ids`` end a reply. ``reserved`` are strings that text must not hold, besides all special tokens.
    With ``refuse_unknown``, a word outside the vocabulary is an error.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        stop_ids: Collection[int],
        *,
        source: str | None = None,
        options: Mapping[str, Any] | None = None,
        reserved: Collection[str] = (),
        refuse_unknown: bool = False,
    ) -> None:
        self.source = source or tokenizer.chat_template
        if not isinstance(self.source, str):
            raise ConfigError("model.path: the tokenizer has no chat template; set model.chat_template to a file")
        self.tokenizer, self.stop_ids, self.options = tokenizer, frozenset(stop_ids), dict(options or {})
        self._refused = tokenizer.unk_token_id if refuse_unknown else None
        special = special_tokens(tokenizer)
        strings = sorted({*special.values(), *reserved}, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, strings)) or r"(?!)")
        self._stops = tuple(special[i] for i in sorted(self.stop_ids) if i in special)
        self._shows_tools = re.search(r"\btools\b", self.source) is not None

    def render(self, messages: Sequence[Message], *, prompt: bool) -> str:
        """The template's text of ``messages``; with ``prompt``, the assistant's header at the end.

        Raises DataError when the template refuses them.
        """
        chat = [turn for m in messages for turn in self._chat(m)]
        tools: list[Any] = [_tool_json(p) for m in messages for p in m.parts if isinstance(p, ToolSpec)]
        if tools and not self._shows_tools:
            raise DataError("the chat template writes no tools; describe them in the text of the system message")
        if not chat:
            raise DataError("a conversation without messages: there is nothing to sample from; give one message")
        try:
            text = self.tokenizer.apply_chat_template(
                chat,
                tools=tools or None,
                tokenize=False,
                add_generation_prompt=prompt,
                chat_template=self.source,
                **self.options,
            )
        except (TemplateError, TypeError) as error:
            roles = ", ".join(m.role for m in messages)
            raise DataError(f"the chat template refuses these messages ({roles}): {error}") from error
        assert isinstance(text, str)
        return text

    def encode(self, history: Sequence[Message]) -> list[int]:
        """The ids of the whole history with the assistant's header.

        Raises DataError when the template refuses the messages, or when text holds a special token.
        """
        self._check(history)
        return self._tokens(self.render(history, prompt=True))

    def reply(self, text: str) -> list[int]:
        """The ids of a reply of this text, which may spell special tokens but holds none, and its end of turn.

        Raises DataError for a word outside the vocabulary.
        """
        encoded = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True)
        ids: list[int] = encoded["input_ids"]
        special = special_tokens(self.tokenizer)
        if (wrong := next((i for i, token in enumerate(ids) if token in special), None)) is not None:
            begin, end = encoded["offset_mapping"][wrong]
            raise DataError(f"a reply: the model has no word for {text[begin:end]!r}: use words of its vocabulary")
        eos = self.tokenizer.eos_token_id
        return [*ids, eos if eos in self.stop_ids else min(self.stop_ids)]

    def extend(self, history: Sequence[Message], last_id: int, new: Sequence[Message]) -> list[int] | Rewritten:
        """The ids between the reply that ends ``history`` and the next sampling.

        ``last_id`` is the last id that was sampled: if it ended the turn, what the template puts behind the end of
        turn (often a newline) comes first, else the end of turn itself. What was sampled is not tokenised again.
        Raises DataError as ``encode`` does.
        """
        if not history or history[-1].role != "assistant":
            raise ValueError("extend: history must end with the reply that was sampled")
        self._check(new)
        before = self.render(history[:-1], prompt=True)
        after = self.render([*history, *new], prompt=True)
        if not after.startswith(before):
            return Rewritten(f"the template changes what came before the last reply: {_difference(before, after)}")
        end = self._reply_end(history, before, after)
        if isinstance(end, Rewritten):
            return end
        ids = self._tokens_behind(after[end:])
        return ids[1:] if ids and ids[0] == last_id and last_id in self.stop_ids else ids

    def _reply_end(self, history: Sequence[Message], before: str, after: str) -> int | Rewritten:
        """Where the last reply ends in ``after``: at its end of turn, or behind its text in templates without one.

        The template may trim or re-format a reply, as long as it does so whether or not messages follow.
        """
        start, stop = len(before), self._next_stop(after, len(before))
        reply = None if any(isinstance(p, ToolCall) for p in history[-1].parts) else self._defused(history[-1].text)
        if reply is not None and stop is not None and after[start:stop].strip() == reply.strip():
            return stop
        alone = self.render(history, prompt=False)
        if alone.startswith(before):
            alone_stop = self._next_stop(alone, start)
            if alone_stop is not None and stop is not None and alone[start:alone_stop] == after[start:stop]:
                return stop
            if alone_stop is None and reply is not None:
                for form in (reply, reply.strip()):
                    if after.startswith(form, start) and alone.startswith(form, start):
                        return start + len(form)
        return Rewritten(f"the template changes the last reply when messages follow: {_difference(alone, after)}")

    def _next_stop(self, text: str, start: int) -> int | None:
        """The next end of turn: text parts cannot hold one, so it is the template's."""
        found = [i for s in self._stops if (i := text.find(s, start)) >= 0]
        return min(found, default=None)

    def _tokens_behind(self, text: str) -> list[int]:
        """The ids of ``text`` that stands behind a reply, which is not read again.

        A special token always is a border. Where the text begins with none, one is put before it for the moment: by
        itself, text may get what a tokenizer writes at the start of a whole one.
        """
        if self._stops and not self._special.match(text):
            return self._tokens(self._stops[0] + text)[1:]
        return self._tokens(text)

    def _tokens(self, text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            near = text[max(0, error.start - 10) : error.end + 10]
            raise DataError(
                f"a text holds half of a surrogate pair, which is no character, at {near!r}: decode it with "
                "errors='replace', or take it out"
            ) from error
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids: list[int] = encoded["input_ids"]
        if self._refused in ids:
            begin, end = encoded["offset_mapping"][ids.index(self._refused)]
            raise DataError(
                f"the word {text[begin:end]!r} is not in the tiny model's vocabulary; add it to model.tiny.words, or "
                "set model.tiny.unknown_words: keep"
            )
        return ids

    def _check(self, messages: Sequence[Message]) -> None:
        """Text that holds a special token would turn into that token: media or a role nobody gave."""
        for m in messages:
            if m.role in _WRITTEN:
                continue
            for part in chain.from_iterable(map(_leaves, m.parts)):
                if found := self._special.search(_text(part)):
                    raise DataError(
                        f"{m.role} message: its text holds the special token {found.group()!r}; roles and media are "
                        "given as messages and parts, never as text: take it out, or put a space into it"
                    )

    def _defused(self, text: str) -> str:
        """Text may spell a special token out of ordinary ones: keep it from becoming one."""
        return self._special.sub(lambda found: found.group()[0] + "\u200b" + found.group()[1:], text)

    def _chat(self, m: Message) -> list[dict[str, Any]]:
        """A message as chat templates want it; tool results become one message each, declared tools none."""
        if m.role == "tool" and any(isinstance(p, ToolResult) for p in m.parts):
            results = [p for p in m.parts if isinstance(p, ToolResult)]
            if len(results) != len(m.parts):
                raise DataError("tool message: tool results mixed with other parts; put these into the results")
            return [{"role": "tool", "tool_call_id": r.id, "content": self._content(m, r.parts)} for r in results]
        calls = [p for p in m.parts if isinstance(p, ToolCall)]
        content = [p for p in m.parts if not isinstance(p, ToolCall | ToolSpec)]
        if len(content) + len(calls) < len(m.parts):
            if m.role != "system":
                raise DataError(f"{m.role} message: it declares a tool; tools are declared in a system message")
            if not content:
                return []
        turn: dict[str, Any] = {"role": m.role, "content": self._content(m, content)}
        if calls:
            turn["tool_calls"] = [
                {"type": "function", "id": c.id, "function": json.loads(self._defused(_call_json(c)))} for c in calls
            ]
        return [turn]

    def _content(self, m: Message, parts: Sequence[Part]) -> str | list[dict[str, str]]:
        """A plain string where there is only text (some templates read nothing else), else typed items."""
        plain = self._defused if m.role in _WRITTEN else str
        content: list[dict[str, str]] = []
        for part in parts:
            if isinstance(part, Text):
                content.append({"type": "text", "text": plain(part.text)})
            elif isinstance(part, Image | Audio | Video):
                kind = type(part).__name__.lower()
                content.append({"type": kind, kind: ""})
            else:
                raise DataError(f"{m.role} message: a {type(part).__name__} belongs into a tool message of its own")
        if all(item["type"] == "text" for item in content):
            return "".join(item["text"] for item in content)
        return content


def special_tokens(tokenizer: PreTrainedTokenizerFast) -> dict[int, str]:
    """The special tokens by id: those with a role (end, padding, unknown ...) and added ones marked special.

    Added tokens that are not marked so, such as ``<think>`` and ``<tool_call>`` of some models, are ordinary words.
    """
    added = {i: str(t) for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    named = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
    return added | {i: str(t) for i, t in named}


def _leaves(part: Part) -> Sequence[Part]:
    return part.parts if isinstance(part, ToolResult) else (part,)


def _text(part: Part) -> str:
    """What a template writes of a part by itself."""
    if isinstance(part, ToolSpec):
        return json.dumps(_tool_json(part), ensure_ascii=False)
    return part.text if isinstance(part, Text) else ""


def _tool_json(spec: ToolSpec) -> dict[str, Any]:
    """As OpenAI's messages and chat templates have it."""
    about = {"name": spec.name, "description": spec.description, "parameters": dict(spec.parameters)}
    return {"type": "function", "function": about}


def _call_json(call: ToolCall) -> str:
    return json.dumps({"name": call.name, "arguments": dict(call.arguments)}, ensure_ascii=False)


def _difference(before: str, after: str) -> str:
    """Where two renderings part, in one line."""
    at = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after)))
    at = max(0, at - 10)
    return f"{before[at : at + 40]!r} becomes {after[at : at + 40]!r}"
