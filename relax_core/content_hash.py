"""Which tasks show the policy the same."""

from __future__ import annotations

import hashlib
import json

from relax_core.types import Audio, Decoded, Image, Part, Task, Text, ToolCall, ToolResult, ToolSpec, Video


def content_hash(task: Task) -> str:
    """A hash of what the policy gets to see: two tasks with equal prompts and media have equal hashes."""
    digest = hashlib.sha256()
    for m in task.messages:
        digest.update(m.role.encode())
        for part in m.parts:
            inner = part.parts if isinstance(part, ToolResult) else (part,)
            for p in inner:
                digest.update(type(p).__name__.encode() + _content_bytes(p) + b"\0")
    return digest.hexdigest()[:32]


def _content_bytes(part: Part) -> bytes:
    if isinstance(part, Text):
        return part.text.encode()
    if isinstance(part, Image | Audio | Video):
        source = part.source
        if isinstance(source, Decoded):
            return source.hash.encode()
        return hashlib.sha256(source if isinstance(source, bytes) else source.read_bytes()).digest()
    if isinstance(part, ToolCall):
        return json.dumps([part.name, dict(part.arguments)], sort_keys=True, ensure_ascii=False).encode()
    if isinstance(part, ToolSpec):
        spec = [part.name, part.description, dict(part.parameters)]
        return json.dumps(spec, sort_keys=True, ensure_ascii=False).encode()
    return b""
