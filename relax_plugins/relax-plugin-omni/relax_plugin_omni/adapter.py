"""The adapter of the Qwen3-Omni thinker: placeholders, positions and features of a row, and the decoder's forward.

Torch and the model's code are imported by the methods that need them: most processes of a run only encode.

Shape legend: B rows, W width, T tokens of a row, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from relax_core.errors import ConfigError, DataError, MissingTrack
from relax_core.interfaces import Extended, ModelAdapter, Rewritten, Segment, TowerInput
from relax_core.models import tokens
from relax_core.models.template import ChatTemplate
from relax_core.types import MEDIA_KINDS, Audio, Decoded, Encoded, MediaKind, MediaPart, MediaRef, Message, Video
from relax_plugin_omni import checkpoint
from relax_plugin_omni.config import OmniConfig
from relax_plugin_omni.positions import VisionBlock, rope_positions
from relax_plugin_omni.processing import Features, Plan, Processor, filled
from relax_plugin_omni.tiny import tiny_config, tiny_tokenizer

if TYPE_CHECKING:
    import torch
    from transformers import Qwen3OmniMoeThinkerForConditionalGeneration as Thinker

    from relax_core.media import MediaStore


PIXELS: Mapping[MediaKind, tuple[str, str]] = {
    "image": ("pixel_values", "image_grid_thw"),
    "video": ("pixel_values_videos", "video_grid_thw"),
}
"""What transformers calls the patches of a picture, and their grid."""


class OmniAdapter(ModelAdapter):
    """Reads text, images, audio and video; the model is transformers' Qwen3OmniMoeThinkerForConditionalGeneration."""

    Config = OmniConfig
    config: OmniConfig
    kinds = frozenset[MediaKind]({"image", "audio", "video"})

    def __init__(self, config: OmniConfig, media: MediaStore, seed: int = 0) -> None:
        super().__init__(config, media, seed)
        tiny = config.tiny
        if tiny is not None:
            self.tokenizer = tiny_tokenizer(tiny)
            thinker = tiny_config(tiny, self.tokenizer)
        else:
            assert config.path is not None
            self.tokenizer = tokens.load_tokenizer(config.path)
            thinker = checkpoint.thinker_config(config.path).to_dict()
        self.processor = Processor(checkpoint.settings(config, thinker))
        self._placeholders: dict[int, MediaKind] = {
            thinker["image_token_id"]: "image",
            thinker["audio_token_id"]: "audio",
            thinker["video_token_id"]: "video",
        }
        self._around_sound = self._sound_tokens() if config.use_audio_in_video else (0, 0)
        decoder = thinker["text_config"]
        self.vocab_size = decoder["vocab_size"]
        self.stop_ids = tokens.stop_ids(self.tokenizer, config.path, decoder.get("eos_token_id"))
        self.banned_token_ids = tokens.banned_ids(self.tokenizer, self.vocab_size, self.stop_ids, self._placeholders)
        self.pad_id = tokens.pad_id(self.tokenizer, self.stop_ids)
        self.template = ChatTemplate(
            self.tokenizer,
            self.stop_ids,
            source=config.chat_template.read_text(encoding="utf-8") if config.chat_template else None,
            options=config.template_options,
            reserved=[str(self.tokenizer.convert_ids_to_tokens(i)) for i in self._placeholders],
            refuse_unknown=tiny is not None and tiny.unknown_words == "error",
        )

    # --- messages to rows ---------------------------------------------------------------------------------------------

    def encode(self, history: Sequence[Message]) -> Encoded:
        """Raises DataError for unreadable media, placeholders that do not match them, and special tokens in text."""
        return self._row(self.template.encode(history), history, Encoded([]))

    def extend(self, history: Sequence[Message], past: Encoded, new: Sequence[Message]) -> Extended | Rewritten:
        """See ``ChatTemplate.extend``. Positions go on behind ``past``. Raises DataError as ``encode`` does."""
        result = self.template.extend(history, past.ids[-1], new)
        return result if isinstance(result, Rewritten) else Extended(self._row(result, new, past))

    def decode(self, ids: Sequence[int]) -> str:
        text = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        assert isinstance(text, str)
        return text

    def reply(self, text: str) -> list[int]:
        return self.template.reply(text)

    def _row(self, ids: list[int], messages: Sequence[Message], past: Encoded) -> Encoded:
        """``ids`` with each placeholder repeated to its medium's length, behind ``past``."""
        queues: dict[MediaKind, list[tuple[str, Plan]]] = {k: [] for k in self._placeholders.values()}
        for part in (part for m in messages for part in m.media()):
            queues[MEDIA_KINDS[type(part)]].append(self._read(part))
        self._check_counts(ids, queues)
        long: list[int] = []
        refs: list[MediaRef] = []
        plans: list[Plan] = []
        for i in ids:
            kind = self._placeholders.get(i)
            if kind is None:
                long.append(i)
                continue
            key, plan = queues[kind].pop(0)
            begin, end = ([token] for token in self._around_sound) if plan.sound is not None else ([], [])
            long += begin
            refs.append(MediaRef(kind, key, len(past.ids) + len(long), plan.tokens))
            plans.append(plan)
            long += [*self._placeholder_ids(kind, plan), *end]
        first = self._next_position(past)
        blocks = [self._block(ref, plan, -len(past.ids)) for ref, plan in zip(refs, plans, strict=True)]
        return Encoded(long, tuple(refs), rope_positions(len(long), [b for b in blocks if b], first))

    def _placeholder_ids(self, kind: MediaKind, plan: Plan) -> list[int]:
        ids = {k: i for i, k in self._placeholders.items()}
        if plan.sound is None:
            return [ids[kind]] * plan.tokens
        return [ids["audio"] if heard else ids["video"] for heard in plan.sound]

    def _sound_tokens(self) -> tuple[int, int]:
        """What stands before and after a video that is read with its sound."""
        known = self.tokenizer.get_vocab()
        if not {"<|audio_start|>", "<|audio_end|>"} <= set(known):
            raise ConfigError(
                "model.use_audio_in_video: the tokenizer has no <|audio_start|> and <|audio_end|>: use one that has"
            )
        return known["<|audio_start|>"], known["<|audio_end|>"]

    def _check_counts(self, ids: Sequence[int], queues: dict[MediaKind, list[tuple[str, Plan]]]) -> None:
        for placeholder, kind in self._placeholders.items():
            if (found := ids.count(placeholder)) != len(queues[kind]):
                raise DataError(
                    f"the chat template writes {found} {kind} placeholders for {len(queues[kind])} {kind} parts; use a "
                    "template that writes one for each"
                )

    def _read(self, part: MediaPart) -> tuple[str, Plan]:
        """Decode a medium and put its features into the store, each once. Returns key and plan."""
        medium = self.media.decode(part)
        sound = self._sound(part)
        heard = "" if sound is None else f"-{sound.hash}"
        key = f"{medium.hash}{heard}-{medium.kind}-{self.processor.digest}"
        made: list[Features] = []

        def make() -> Features:
            made.append(self._made(part, medium, sound))
            return made[0]

        self.media.features(key, make)
        return key, self.processor.plan(made[0] if made else self.media.get(key))

    def _sound(self, part: MediaPart) -> Decoded | None:
        """The sound of a video that is to be read with it. Raises DataError where it must have one and has none."""
        wanted = self.config.use_audio_in_video
        if not wanted or not isinstance(part, Video):
            return None
        try:
            if isinstance(part.source, Decoded):
                raise MissingTrack(
                    "video given as frames has no sound: give its file, or set use_audio_in_video: if_any"
                )
            return self.media.decode(Audio(part.source))
        except MissingTrack:
            if wanted == "if_any":
                return None
            raise

    def _made(self, part: MediaPart, medium: Decoded, sound: Decoded | None) -> Features:
        try:
            return self.processor.features(medium, sound)
        except DataError as error:
            source = part.source if isinstance(part.source, Path) else "given in memory"
            raise DataError(f"{MEDIA_KINDS[type(part)]} {source}: {error}") from error

    # --- positions ----------------------------------------------------------------------------------------------------

    def _block(self, ref: MediaRef, plan: Plan, shift: int) -> VisionBlock | None:
        """The positions' view of a picture; None for audio, which advances like text."""
        if plan.grid is None:
            return None
        t, h, w = plan.grid
        merge = self.processor.settings.merge
        return VisionBlock(ref.start + shift, (t, h // merge, w // merge), plan.step, plan.sound)

    def _next_position(self, past: Encoded) -> int:
        if not past.ids:
            return 0
        known = past.positions
        if known is None:
            known = self._positions(Segment(past.ids, past.media))
        return int(known[:, -1].max()) + 1

    def _positions(self, segment: Segment) -> NDArray[np.int32]:
        """The segment's own positions (3, T), or those that a row of its ids and media has."""
        if segment.positions is not None:
            return segment.positions
        plans = [self.processor.plan(self.media.get(ref.key)) for ref in segment.media]
        blocks = [self._block(ref, plan, 0) for ref, plan in zip(segment.media, plans, strict=True)]
        return rope_positions(len(segment.ids), [b for b in blocks if b])

    # --- rows to the model --------------------------------------------------------------------------------------------

    def forward_inputs(self, segments: Sequence[Segment], width: int) -> dict[str, Any]:
        """``input_ids`` int64 (B, W), ``position_ids`` int64 (3, B, W), and each medium's features once (``media_*``).

        A segment may be a whole row, a part of one, or several rows packed behind each other, with its own positions.
        Raises DataError when placeholders and media do not match, for every kind.
        """
        import torch

        from relax_core.models import hf
        from relax_plugin_omni import towers

        positions_3BW = np.zeros((3, len(segments), width), np.int64)
        features = {ref.key: self.media.get(ref.key) for segment in segments for ref in segment.media}
        plans = {key: self.processor.plan(found) for key, found in features.items()}
        refs: list[tuple[int, MediaRef]] = []
        for row, segment in enumerate(segments):
            self._check_placeholders(segment, plans)
            positions_3BW[:, row, : len(segment.ids)] = self._positions(segment)
            refs += [(row * width + ref.start, ref) for ref in sorted(segment.media, key=lambda r: r.start)]
        return {
            "input_ids": hf.token_rows(segments, width, self.pad_id),
            "position_ids": torch.from_numpy(positions_3BW),
            **towers.media_inputs(refs, features, plans, self.processor.settings.window),
        }

    def tower_inputs(self, row: Segment) -> list[TowerInput]:
        """Raises DataError when placeholders and media do not match.

        Spectrograms end with the zeros that the tower reads after them.
        """
        plans = {ref.key: self.processor.plan(self.media.get(ref.key)) for ref in row.media}
        self._check_placeholders(row, plans)
        found: list[TowerInput] = []
        for ref in row.media:
            features, plan = self.media.get(ref.key), plans[ref.key]
            if "pixels" in features:
                pixels, grid = PIXELS[ref.kind]
                read = {pixels: features["pixels"], grid: features["grid"]}
                found.append(TowerInput(ref.kind, ref.key, ref.start + plan.places("vision"), read))
            if "mel" in features:
                heard = {"input_features": filled(features["mel"], self.processor.settings.window)}
                found.append(TowerInput("audio", ref.key, ref.start + plan.places("audio"), heard))
        return found

    def _check_placeholders(self, segment: Segment, plans: Mapping[str, Plan]) -> None:
        """Every placeholder belongs to a medium of its kind: too few audio ones would pass unseen otherwise."""
        ids_T = np.asarray(segment.ids)
        expected_T = np.full(len(ids_T), -1)
        total = 0
        for ref in segment.media:
            plan = plans[ref.key]
            if ref.length != plan.tokens:
                raise DataError(
                    f"{ref.kind} {ref.key}: {ref.length} placeholders in the row, and the model reads {plan.tokens} "
                    "tokens; encode the row with the same settings as the model's"
                )
            span = expected_T[ref.start : ref.start + ref.length]
            span[:] = self._placeholder_ids(ref.kind, plan)[: len(span)]
            total += ref.length
        found_T = np.where(np.isin(ids_T, list(self._placeholders)), ids_T, -1)
        if total != (expected_T >= 0).sum() or (found_T != expected_T).any():
            kinds = [kind for i, kind in self._placeholders.items() if ((found_T == i) != (expected_T == i)).any()]
            kind = kinds[0] if kinds else segment.media[0].kind
            placeholder = {k: i for i, k in self._placeholders.items()}[kind]
            raise DataError(
                f"a row holds {int((found_T == placeholder).sum())} {kind} placeholders, and its {kind} media take "
                f"{int((expected_T == placeholder).sum())} (or stand elsewhere); a row must be as encode and extend "
                "made it"
            )

    def load(self, device: str, dtype: torch.dtype) -> Thinker:
        """Raises ConfigError for a checkpoint that lacks weights of the thinker."""
        from relax_core.models import hf
        from relax_plugin_omni.thinker import load_thinker, random_thinker

        tiny = self.config.tiny
        if tiny is not None:
            with hf.seeded(self.seed if tiny.seed is None else tiny.seed):
                model = random_thinker(tiny_config(tiny, self.tokenizer))
        else:
            assert self.config.path is not None
            model = load_thinker(self.config.path, dtype)
        model.set_experts_implementation(self.config.experts)
        hf.placed(model, device, dtype)
        return model

    def backbone(self, model: torch.nn.Module, **inputs: Any) -> torch.Tensor:
        """Further keyword arguments of the decoder are passed on: attention_mask (2-D or 4-D), cache, use_cache ...

        ``position_ids`` must be given: without them the model would guess from its last call.
        """
        from relax_core.models import hf
        from relax_plugin_omni import towers

        if inputs.get("position_ids") is None:
            raise ValueError("backbone: position_ids (3, B, W) are missing; forward_inputs makes them")
        thinker = cast("Thinker", model)
        inputs = hf.on_device(inputs, thinker.device)
        media = {k: inputs.pop(k) for k in list(inputs) if k.startswith(towers.PREFIX)}
        parts = towers.Parts.of(thinker)
        embedded = towers.embed(parts, inputs.pop("input_ids"), media)
        return hf.hidden_states(parts.decoder, {**inputs, **embedded})

    def head(self, model: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = cast("Thinker", model).lm_head(hidden)
        return logits

    def save(self, model: torch.nn.Module, folder: Path) -> None:
        """A thinker's folder, with the settings of processing in ``preprocessor_config.json``."""
        from relax_core.models import hf

        hf.save_pretrained(model, self.tokenizer, folder)
        checkpoint.save_settings(self.processor.settings, folder)
