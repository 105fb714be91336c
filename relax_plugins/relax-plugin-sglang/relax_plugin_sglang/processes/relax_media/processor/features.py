"""What stands between requests with media and the model: here nothing is decoded, scaled or counted anew.

A request brings, as JSON in its one ``image_data``, the features that the trainer reads, their places among its ids,
and the positions of these. What does not fit the server's model is refused, with the numbers.

Legend: T tokens of a prompt, N patches, D values of a patch, M mel bins, S spectrogram frames.
"""

from __future__ import annotations

import base64
import hashlib
from typing import Any, ClassVar

import orjson
import torch
from sglang.srt.managers import tokenizer_manager
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalProcessorOutput
from sglang.srt.models.qwen3_omni_moe import Qwen3OmniMoeForConditionalGeneration
from sglang.srt.multimodal.processors.base_processor import BaseMultimodalProcessor
from transformers import PretrainedConfig

FORMAT = "relax-media-1"
"""In every refusal too, by which a server with this package is known."""

_FEATURES = {
    Modality.IMAGE: ("pixel_values", "image_grid_thw"),
    Modality.VIDEO: ("pixel_values_videos", "video_grid_thw"),
    Modality.AUDIO: ("input_features", None),
}
"""Names of an item's arrays: pixels (N, D) and grid (3,), or a spectrogram (M, S)."""
_padded = getattr(MultimodalProcessorOutput, "build_padded_input_ids", None)
"""Puts what stands for each medium's hash in its places; None: the scheduler does (up to SGLang 0.5.12)."""
_DTYPES = {"float32": torch.float32, "int64": torch.int64, "int32": torch.int32}


class RelaxFeatures(BaseMultimodalProcessor):  # type: ignore[misc]
    """Of a Qwen3-Omni. The processor of transformers is not used, and need not be there."""

    models: ClassVar = [Qwen3OmniMoeForConditionalGeneration]

    def __init__(self, hf_config: Any, server_args: Any, _processor: Any, *args: Any, **kwargs: Any) -> None:
        thinker = hf_config.thinker_config
        super().__init__(thinker, server_args, _processor, *args, **kwargs)
        self.merged: int = thinker.vision_config.spatial_merge_size**2
        self.chunk: int = 2 * thinker.audio_config.n_window
        self.placeholders = {
            Modality.IMAGE: thinker.image_token_id,
            Modality.VIDEO: thinker.video_token_id,
            Modality.AUDIO: thinker.audio_token_id,
        }

    async def process_mm_data_async(
        self, image_data: Any, audio_data: Any = None, input_text: Any = None, request_obj: Any = None, **_: Any
    ) -> MultimodalProcessorOutput:
        """``input_text``: the prompt's ids. Raises ValueError, which the server answers with status 400."""
        found = _read(image_data[0]) if image_data and len(image_data) == 1 else None
        if not isinstance(found, dict) or found.get("format") != FORMAT or not found.get("items"):
            raise ValueError(f"{FORMAT}: a request brings no features in this format; this server reads no other media")
        ids, salt = list(input_text), str(request_obj.extra_key)
        items = [self._item(each, salt) for each in found["items"]]
        self._check(ids, items)
        positions = _tensor(found["positions"]).long()
        if tuple(positions.shape) != (3, len(ids)):
            raise ValueError(f"{FORMAT}: positions {tuple(positions.shape)} for {len(ids)} ids; expected one for each")
        padded = {"padded_input_ids": _padded(ids, items)} if _padded else {}
        return MultimodalProcessorOutput(
            **padded,
            input_ids=ids,
            mm_items=items,
            im_token_id=self.placeholders[Modality.IMAGE],
            video_token_id=self.placeholders[Modality.VIDEO],
            audio_token_id=self.placeholders[Modality.AUDIO],
            mrope_positions=positions,
            mrope_position_delta=(positions[:, -1].max() + 1 - len(ids)).reshape(1, 1),
        )

    def _item(self, found: dict[str, Any], salt: str) -> MultimodalDataItem:
        """One tower's share of one medium.

        The server keeps what a tower makes by ``hash``, whatever the weights: hence the salt, which has the version.
        """
        kind = Modality.from_str(found["kind"])
        values, grid = _FEATURES[kind]
        item = MultimodalDataItem(modality=kind, offsets=[(int(first), int(last)) for first, last in found["places"]])
        item.feature = _tensor(found["features"][values])
        if grid is not None:
            item.set(grid, _tensor(found["features"][grid]).reshape(1, 3))
        digest = hashlib.sha256(f"{salt}|{kind.name}|{found['key']}".encode()).digest()
        item.hash = int.from_bytes(digest[:7], "big")
        item.set_pad_value()
        places = sum(last - first + 1 for first, last in item.offsets)
        if places != (read := self._tokens(item)):
            raise ValueError(
                f"{FORMAT}: {found['kind']} has {places} placeholders, the server's model reads {read} tokens"
            )
        return item

    def _tokens(self, item: MultimodalDataItem) -> int:
        """How many the towers make."""
        if item.modality is Modality.AUDIO:
            whole, rest = divmod(len(item.feature[0]), self.chunk)
            return whole * _halved(self.chunk) + _halved(rest)
        name = _FEATURES[item.modality][1]
        patches = int(item.model_specific_data[name].prod())
        if patches != len(item.feature):
            raise ValueError(f"{FORMAT}: {len(item.feature)} patches of a picture whose grid has {patches}")
        return patches // self.merged

    def _check(self, ids: list[int], items: list[MultimodalDataItem]) -> None:
        """Every placeholder of the prompt belongs to a medium of its kind, and no other id does."""
        for kind, placeholder in self.placeholders.items():
            owned = {i for item in items if item.modality is kind for a, b in item.offsets for i in range(a, b + 1)}
            standing = {i for i, token in enumerate(ids) if token == placeholder}
            if owned != standing:
                raise ValueError(
                    f"{FORMAT}: the prompt has {len(standing)} {kind.name.lower()} placeholders (id {placeholder}), "
                    f"and its media take {len(owned)} (or stand elsewhere)"
                )


def _read(text: Any) -> Any:
    """The JSON of a request; None for what is none."""
    try:
        return orjson.loads(text)
    except ValueError:
        return None


def _tensor(found: dict[str, Any]) -> torch.Tensor:
    data = bytearray(base64.b64decode(found["data"]))
    return torch.frombuffer(data, dtype=_DTYPES[found["dtype"]]).reshape(found["shape"])


def _halved(frames: int) -> int:
    """Three convolutions of stride 2."""
    return -(-frames // 8)


def spare(module: Any) -> None:
    """Let the tokenizer manager make no processor of transformers where ``RelaxFeatures`` does its work: it would need
    torchvision, and files that a folder of weights may lack."""
    original, served = module.get_processor, {kind.__name__ for kind in RelaxFeatures.models}

    def processor(name: str, *args: Any, **settings: Any) -> Any:
        found, _ = PretrainedConfig.get_config_dict(name, revision=settings.get("revision"))
        return None if served & set(found.get("architectures") or ()) else original(name, *args, **settings)

    module.get_processor = processor


spare(tokenizer_manager)
