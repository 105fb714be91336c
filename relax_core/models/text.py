"""The adapter of plain language models: any causal LM in a Hugging Face folder, or a tiny random Qwen3.

Torch and transformers' models are imported by the methods that need them: most processes of a run only encode.

Shape legend: B rows, W width, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from relax_core.errors import ConfigError, DataError
from relax_core.interfaces import Extended, ModelAdapter, Rewritten, Segment
from relax_core.models import tokens
from relax_core.models.config import TextConfig, TinyModel
from relax_core.models.template import ChatTemplate
from relax_core.models.words import word_tokenizer
from relax_core.types import MEDIA_KINDS, Encoded, Message

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config

    from relax_core.media import MediaStore

_LAYERS = {"full_attention", "sliding_attention"}


class TextAdapter(ModelAdapter):
    """Reads text only. Models with recurrent layers are refused: they see through masks."""

    Config = TextConfig
    config: TextConfig

    def __init__(self, config: TextConfig, media: MediaStore, seed: int = 0) -> None:
        super().__init__(config, media, seed)
        tiny = config.tiny
        if tiny is not None:
            self.tokenizer = word_tokenizer(tiny.words)
            self.vocab_size = len(self.tokenizer)
            self.stop_ids = tokens.stop_ids(self.tokenizer, None)
        else:
            assert config.path is not None
            self.tokenizer = tokens.load_tokenizer(config.path)
            decoder = _decoder_config(config.path)
            self.vocab_size = decoder.vocab_size
            self.stop_ids = tokens.stop_ids(self.tokenizer, config.path, getattr(decoder, "eos_token_id", None))
        self.pad_id = tokens.pad_id(self.tokenizer, self.stop_ids)
        self.banned_token_ids = tokens.banned_ids(self.tokenizer, self.vocab_size, self.stop_ids)
        self.template = ChatTemplate(
            self.tokenizer,
            self.stop_ids,
            source=config.chat_template.read_text(encoding="utf-8") if config.chat_template else None,
            options=config.template_options,
            refuse_unknown=tiny is not None and tiny.unknown_words == "error",
        )

    def encode(self, history: Sequence[Message]) -> Encoded:
        """Raises DataError for media, for a refused conversation, and for special tokens in text."""
        self._refuse_media(history)
        return Encoded(self.template.encode(history))

    def extend(self, history: Sequence[Message], past: Encoded, new: Sequence[Message]) -> Extended | Rewritten:
        """See ``ChatTemplate.extend``. Raises DataError as ``encode`` does."""
        self._refuse_media(new)
        result = self.template.extend(history, past.ids[-1], new)
        return result if isinstance(result, Rewritten) else Extended(Encoded(result))

    def decode(self, ids: Sequence[int]) -> str:
        text = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        assert isinstance(text, str)
        return text

    def reply(self, text: str) -> list[int]:
        return self.template.reply(text)

    def forward_inputs(self, segments: Sequence[Segment], width: int) -> dict[str, Any]:
        """``input_ids`` and ``position_ids``, int64 (B, W). Positions may be given as (W,) or as equal rows (3, W)."""
        import torch

        from relax_core.models import hf

        positions_BW = np.zeros((len(segments), width), np.int64)
        for row, segment in enumerate(segments):
            n = len(segment.ids)
            given = np.arange(n) if segment.positions is None else np.atleast_2d(segment.positions)[0]
            positions_BW[row, :n] = given
        return {
            "input_ids": hf.token_rows(segments, width, self.pad_id),
            "position_ids": torch.from_numpy(positions_BW),
        }

    def load(self, device: str, dtype: torch.dtype) -> PreTrainedModel:
        """Raises ConfigError for a checkpoint with missing weights, and for an architecture that cannot be packed."""
        from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

        from relax_core.models import hf

        if self.config.tiny is not None:
            with hf.seeded(self.seed if self.config.tiny.seed is None else self.config.tiny.seed):
                tiny = Qwen3ForCausalLM(tiny_qwen3(self.config.tiny, self.tokenizer))
            return hf.placed(tiny, device, dtype)
        assert self.config.path is not None
        model = hf.load_pretrained(AutoModelForCausalLM, self.config.path, dtype)
        model = hf.placed(model, device, dtype)
        hf.check_forward(self, model)
        return model

    def backbone(self, model: torch.nn.Module, **inputs: Any) -> torch.Tensor:
        """Further keyword arguments of the decoder are passed on: attention_mask, cache, use_cache ...

        A 4-D mask holds for all layers alike; a model with sliding windows takes a mapping of one for each layer type.
        """
        from relax_core.models import hf

        pretrained = cast("PreTrainedModel", model)
        return hf.hidden_states(pretrained.base_model, hf.on_device(inputs, pretrained.device))

    def head(self, model: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """Logits with the scale and the soft cap that the model's config states."""
        pretrained = cast("PreTrainedModel", model)
        logits: torch.Tensor = pretrained.get_output_embeddings()(hidden)  # type: ignore[no-untyped-call]
        decoder = pretrained.config.get_text_config()
        if (scale := getattr(decoder, "logit_scale", None)) is not None:
            logits = logits * scale
        if (divisor := getattr(decoder, "logits_scaling", None)) is not None:
            logits = logits / divisor
        if (cap := getattr(decoder, "final_logit_softcapping", None)) is not None:
            logits = (logits / cap).tanh() * cap
        return logits

    def save(self, model: torch.nn.Module, folder: Path) -> None:
        from relax_core.models import hf

        hf.save_pretrained(model, self.tokenizer, folder)

    def _refuse_media(self, messages: Sequence[Message]) -> None:
        for m in messages:
            for part in m.media():
                name = self.config.path.name if self.config.path else "the tiny text model"
                raise DataError(
                    f"{m.role} message: holds {MEDIA_KINDS[type(part)]}, and model.id text ({name}) reads text only; "
                    "use a model that reads it (qwen3-omni), or take it out"
                )


def tiny_qwen3(tiny: TinyModel, tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=tiny.hidden,
        intermediate_size=3 * tiny.hidden,
        num_hidden_layers=tiny.layers,
        num_attention_heads=tiny.heads,
        num_key_value_heads=tiny.kv_heads,
        head_dim=tiny.hidden // tiny.heads,
        max_position_embeddings=4096,
        initializer_range=tiny.init_std,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        tie_word_embeddings=False,
    )


def _decoder_config(folder: Path) -> PreTrainedConfig:
    """Of a model folder. Raises ConfigError for layers that carry a state: they see through padding and packing."""
    from transformers import AutoConfig  # with torch

    found = AutoConfig.from_pretrained(folder, local_files_only=True)
    decoder: PreTrainedConfig = found.get_text_config()
    if other := sorted(set(getattr(decoder, "layer_types", None) or ()) - _LAYERS):
        raise ConfigError(
            f"model.path: layers of type {other[0]} (in {decoder.model_type}) carry a state through masks; allowed: "
            f"{', '.join(sorted(_LAYERS))}"
        )
    return decoder
