"""A medium as a part of a message in OpenAI's format, with its content inside."""

from __future__ import annotations

import base64
from typing import Any

from relax_core.media_files import Format
from relax_core.types import MediaKind


def media_part(kind: MediaKind, content: bytes, found: Format | None) -> dict[str, Any]:
    """``found``: the format of the file; None where it is not known, which a sound must not have."""
    data = base64.b64encode(content).decode()
    if kind == "audio":
        assert found is not None
        return {"type": "input_audio", "input_audio": {"data": data, "format": found.suffix.removeprefix(".")}}
    media_type = found.media_type if found else f"{kind}/*"
    return {"type": f"{kind}_url", f"{kind}_url": {"url": f"data:{media_type};base64,{data}"}}
