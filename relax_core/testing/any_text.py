"""A model adapter without a model, which reads and says any text and any medium: plays of tests speak through it.

A token is a byte of UTF-8; ``END`` ends every message, and a medium is one token. Nothing is ever rewritten.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_core.interfaces import ComponentConfig, Extended, ModelAdapter, Rewritten, Segment
from relax_core.types import MEDIA_KINDS, Encoded, MediaPart, MediaRef, Message, Part, Text, ToolCall, ToolResult

if TYPE_CHECKING:
    import torch

    from relax_core.media import MediaStore

END = 256
PLACES = {"image": 257, "audio": 258, "video": 259}


class AnyText(ModelAdapter):
    """Media are decoded (DataError for one that cannot be); nothing more of them is kept than that they are there."""

    kinds = frozenset(MEDIA_KINDS.values())
    stop_ids = frozenset({END})
    banned_token_ids = tuple(PLACES.values())
    pad_id = END
    vocab_size = 260

    def __init__(self, media: MediaStore) -> None:
        super().__init__(ComponentConfig(), media)

    def encode(self, history: Sequence[Message]) -> Encoded:
        return self._encoded(history, [], 0)

    def extend(self, history: Sequence[Message], past: Encoded, new: Sequence[Message]) -> Extended | Rewritten:
        return Extended(self._encoded(new, [] if past.ids[-1] == END else [END], len(past.ids)))

    def _encoded(self, messages: Sequence[Message], ids: list[int], start: int) -> Encoded:
        media: list[MediaRef] = []
        for m in messages:
            ids += f"{m.role}: ".encode()
            for part in m.parts:
                for one in part.parts if isinstance(part, ToolResult) else (part,):
                    if type(one) in MEDIA_KINDS:
                        media.append(self._medium(one, start + len(ids)))  # type: ignore[arg-type]
                        ids.append(PLACES[media[-1].kind])
                    else:
                        ids += _text(one).encode(errors="replace")
            ids.append(END)
        return Encoded([*ids, *b"assistant: "], tuple(media))

    def _medium(self, part: MediaPart, start: int) -> MediaRef:
        decoded = self.media.decode(part)
        key = self.media.features(f"{decoded.hash}-any-text", dict)
        return MediaRef(decoded.kind, key, start, 1)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < END).decode(errors="replace")

    def reply(self, text: str) -> list[int]:
        return [*text.encode(errors="replace"), END]

    def forward_inputs(self, segments: Sequence[Segment], width: int) -> dict[str, Any]:
        raise NotImplementedError("AnyText has no model")

    def load(self, device: str, dtype: torch.dtype) -> torch.nn.Module:
        raise NotImplementedError("AnyText has no model")

    def backbone(self, model: torch.nn.Module, **inputs: Any) -> torch.Tensor:
        raise NotImplementedError("AnyText has no model")

    def head(self, model: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("AnyText has no model")

    def save(self, model: torch.nn.Module, folder: Path) -> None:
        raise NotImplementedError("AnyText has no model")


def _text(part: Part) -> str:
    if isinstance(part, Text):
        return part.text
    if isinstance(part, ToolCall):
        call = json.dumps({"name": part.name, "arguments": dict(part.arguments)}, ensure_ascii=False)
        return f"<tool_call>\n{call}\n</tool_call>"
    return repr(part)  # such as the declaration of a tool
