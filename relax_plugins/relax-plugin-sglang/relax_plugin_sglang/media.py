"""Media on their way to a server: the features that the trainer reads, as they are, with their places and positions.

A server decodes, scales and counts nothing: packages of ours (``processes/relax_media``), which it loads by settings of
its own, read this format there, and refuse what does not fit its model.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from relax_core.errors import EngineError
from relax_core.interfaces import ModelAdapter, Segment
from relax_core.types import MediaKind
from relax_plugin_sglang.client import fastest

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from relax_core.types import Encoded
    from relax_plugin_sglang.client import Client

FORMAT = "relax-media-1"
"""In every refusal of ours too, by which a server with our packages is known."""

SERVED: dict[str, frozenset[MediaKind]] = {"qwen3_omni_moe": frozenset({"image", "audio", "video"})}
"""What our packages read, by the type of the server's model."""

_SHORT = {"sampling_params": {"max_new_tokens": 1}}


def check_adapter(adapter: ModelAdapter) -> None:
    """Raises EngineError for one that reads media, and does not hand them over."""
    if adapter.kinds and type(adapter).tower_inputs is ModelAdapter.tower_inputs:
        raise EngineError(
            f"engine.id: sglang gets the features of media from the model, and {type(adapter).__name__}, which reads "
            f"{_listed(adapter.kinds)}, does not hand them over (tower_inputs); use torch, or a model of text"
        )


def check_model(adapter: ModelAdapter, model_type: str) -> None:
    """Raises EngineError for a server's model to which we cannot give what ours reads."""
    if lacking := adapter.kinds - SERVED.get(model_type, frozenset()):
        served = "; ".join(f"{_listed(of)} to {name}" for name, of in SERVED.items())
        raise EngineError(
            f"engine.id: sglang gives no {_listed(lacking)} to a model of type {model_type} (it does: {served}); use "
            "torch, or a model of text"
        )


async def check_server(client: Client) -> None:
    """Raises EngineError for a server elsewhere that was started without our packages."""
    try:
        await client.post("/generate", {"input_ids": [0], "image_data": [FORMAT], **_SHORT})
    except EngineError as error:
        if FORMAT in str(error):
            return
    raise EngineError(
        f"engine.url: the server at {client.url} does not read the features of media that we send: start it with the "
        "environment that relax_plugin_sglang's README gives"
    )


def carried(adapter: ModelAdapter, prompt: Encoded) -> str:
    """What the server's ``image_data`` holds, for all kinds: JSON as one string, since newer releases (as 0.5.23)
    read objects there as their own. Raises DataError for rows that do not fit their media."""
    found: dict[str, Any] = {"format": FORMAT}
    if prompt.positions is not None:
        found["positions"] = _coded(prompt.positions)
    found["items"] = [
        {
            "kind": each.kind,
            "key": each.key,
            "places": list(_runs(each.places_K)),
            "features": {name: _coded(values) for name, values in each.features.items()},
        }
        for each in adapter.tower_inputs(Segment(prompt.ids, prompt.media, prompt.positions))
    ]
    dumps, _ = fastest()
    return dumps(found).decode()


def _coded(values: NDArray[Any]) -> dict[str, Any]:
    return {
        "dtype": str(values.dtype),
        "shape": list(values.shape),
        "data": base64.b64encode(values.tobytes()).decode(),
    }


def _runs(places_K: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """(first, last) of places that follow each other."""
    import numpy as np

    for run in np.split(places_K, np.flatnonzero(np.diff(places_K) != 1) + 1):
        yield int(run[0]), int(run[-1])


def _listed(kinds: frozenset[MediaKind]) -> str:
    return ", ".join(sorted(kinds))
