"""A tiny random language model behind a ``ModelAdapter``, for tests of engines, trainers and plugins.

The vocabulary is ``<pad> <eos> <unk>``, ``<image>`` where images are on, and the words of the config. A prompt is just
the words of the messages: there is no template, so extending a history never rewrites it. ``<eos>`` ends a reply; the
other special tokens are never sampled. An image is one ``<image>`` token whose embedding is shifted by its mean colour.

    adapter = tiny_adapter("red green blue")
    prompt = adapter.encode([user("red green")])
    model = adapter.load("cpu", torch.float32)      # a Qwen3 of transformers, equal bits at every call
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from relax_core.errors import DataError
from relax_core.interfaces import ComponentConfig, Extended, ModelAdapter, Rewritten, Segment
from relax_core.types import Encoded, MediaPart, MediaRef, Message, Text, ToolResult

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

    from relax_core.media import MediaStore

WORDS = " ".join(f"w{i:02d}" for i in range(29))
SPECIAL = ("<pad>", "<eos>", "<unk>")


class TinyConfig(ComponentConfig):
    words: str = WORDS
    """Separated by spaces."""
    hidden: int = 32
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    max_positions: int = 512
    """Prompt and reply together."""
    sliding_window: int | None = None
    """Tokens that every second layer sees; default: all layers see all."""
    std: float = 0.2
    """Of the random weights; large enough for uneven distributions."""
    seed: int = 0
    """Of the random weights."""
    images: bool = False
    """Whether the model reads images."""


def vocabulary(words: str, images: bool = False) -> dict[str, int]:
    """Token -> id."""
    return {w: i for i, w in enumerate((*SPECIAL, *(("<image>",) if images else ()), *words.split()))}


def tiny_tokenizer(words: str = WORDS, images: bool = False) -> PreTrainedTokenizerFast:
    """A fast tokenizer of transformers over ``vocabulary``, splitting at white space."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.WordLevel(vocabulary(words, images), unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    make = cast(Any, PreTrainedTokenizerFast)
    return cast(
        PreTrainedTokenizerFast,
        make(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"),
    )


def tiny_qwen3(vocab_size: int, config: TinyConfig | None = None) -> Qwen3ForCausalLM:
    """A random Qwen3 with tied embeddings, float32, in eval mode. Leaves torch's global generator as it was."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    c = config or TinyConfig()
    kinds = ["full_attention" if c.sliding_window is None or i % 2 else "sliding_attention" for i in range(c.layers)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(c.seed)
        model = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=vocab_size,
                hidden_size=c.hidden,
                num_hidden_layers=c.layers,
                num_attention_heads=c.heads,
                num_key_value_heads=c.kv_heads,
                head_dim=c.hidden // c.heads,
                intermediate_size=3 * c.hidden,
                max_position_embeddings=c.max_positions,
                tie_word_embeddings=True,
                initializer_range=c.std,
                use_sliding_window=c.sliding_window is not None,
                sliding_window=c.sliding_window,
                layer_types=kinds,
                pad_token_id=0,
                bos_token_id=None,
                eos_token_id=1,
            )
        )
    model.eval()  # type: ignore[no-untyped-call]
    return model


class TinyAdapter(ModelAdapter):
    """See the module's docstring."""

    Config = TinyConfig
    pad_id = 0
    stop_ids = frozenset({1})

    def __init__(self, config: TinyConfig, media: MediaStore, seed: int = 0) -> None:
        super().__init__(config, media, seed)
        self.ids = vocabulary(config.words, config.images)
        self.words = list(self.ids)
        self.vocab_size = len(self.ids)
        self.banned_token_ids = tuple(i for w, i in self.ids.items() if w.startswith("<") and i not in self.stop_ids)
        self.kinds = frozenset({"image"}) if config.images else frozenset()

    def encode(self, history: Sequence[Message]) -> Encoded:
        return self._encode(history, 0)

    def extend(self, history: Sequence[Message], past: Encoded, new: Sequence[Message]) -> Extended | Rewritten:
        return Extended(self._encode(new, len(past.ids)))

    def _encode(self, messages: Sequence[Message], start: int) -> Encoded:
        ids: list[int] = []
        media: list[MediaRef] = []
        for m in messages:
            for part in m.parts:
                for p in part.parts if isinstance(part, ToolResult) else (part,):
                    if isinstance(p, Text):
                        ids += [self.ids.get(word, self.ids["<unk>"]) for word in p.text.split()]
                    elif "image" in self.kinds and type(p).__name__ == "Image":
                        media.append(MediaRef("image", self._feature(cast(MediaPart, p)), start + len(ids), 1))
                        ids.append(self.ids["<image>"])
        return Encoded(ids, tuple(media))

    def _feature(self, part: MediaPart) -> str:
        import numpy as np

        decoded = self.media.decode(part)
        colour = decoded.data.reshape(-1, 3).mean(0) / 255
        return self.media.features(f"{decoded.hash}-image-tiny", lambda: {"colour": colour.astype(np.float32)})

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(self.words[i] for i in ids if i > 2)

    def reply(self, text: str) -> list[int]:
        if unknown := [word for word in text.split() if word not in self.ids]:
            raise DataError(f"a reply: the tiny model has no token for {unknown[0]!r}: use words of its vocabulary")
        return [*(self.ids[word] for word in text.split()), 1]

    def forward_inputs(self, segments: Sequence[Segment], width: int) -> dict[str, Any]:
        import torch

        input_ids = torch.full((len(segments), width), self.pad_id)
        position_ids = torch.arange(width).repeat(len(segments), 1)
        colours = torch.zeros(len(segments), width, 3)
        for i, segment in enumerate(segments):
            input_ids[i, : len(segment.ids)] = torch.tensor(list(segment.ids))
            if segment.positions is not None:
                position_ids[i, : len(segment.ids)] = torch.from_numpy(segment.positions[0].astype("int64"))
            for ref in segment.media:
                colours[i, ref.start] = torch.from_numpy(self.media.get(ref.key)["colour"])
        inputs: dict[str, Any] = {"input_ids": input_ids, "position_ids": position_ids}
        return {**inputs, "colours": colours} if self.kinds else inputs

    def load(self, device: str, dtype: torch.dtype) -> Qwen3ForCausalLM:
        return cast(Any, tiny_qwen3(self.vocab_size, self.config)).to(device=device, dtype=dtype)  # type: ignore[no-any-return]

    def backbone(self, model: torch.nn.Module, **inputs: Any) -> torch.Tensor:
        from torch.nn.functional import pad

        colours = inputs.pop("colours", None)
        if inputs["position_ids"].ndim == 3:  # one axis is enough for this model
            inputs["position_ids"] = inputs["position_ids"][0]
        body = cast(Any, model).model
        if colours is not None:
            embedded = body.embed_tokens(inputs.pop("input_ids"))
            inputs["inputs_embeds"] = embedded + pad(colours, (0, embedded.shape[-1] - 3)).to(embedded.dtype)
        return cast("torch.Tensor", body(**inputs).last_hidden_state)

    def head(self, model: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        return cast("torch.Tensor", cast(Any, model).lm_head(hidden))

    def save(self, model: torch.nn.Module, folder: Path) -> None:
        cast(Any, model).save_pretrained(folder)
        tiny_tokenizer(self.config.words, self.config.images).save_pretrained(folder)


def tiny_adapter(words: str = WORDS, media: MediaStore | None = None, **settings: Any) -> TinyAdapter:
    """A TinyAdapter; ``settings`` are fields of TinyConfig. Without ``media`` it gets a store that decodes nothing."""
    from relax_core.media import MediaStore

    return TinyAdapter(TinyConfig(words=words, **settings), media or MediaStore({}, max_bytes=1 << 20))
