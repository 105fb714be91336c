"""Tokenizers of tiny models: one token a word, split at white space, with a chat template in the same spirit."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from relax_core.types import MediaKind

END, PAD, UNKNOWN = "<|im_end|>", "<|endoftext|>", "<|unk|>"
ROLES = ("system", "user", "assistant", "tool")

_TEMPLATE = """\
{%- for message in messages -%}
{{ message.role + ' ' }}
{%- if message.content is string -%}{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'text' -%}{{ part.text }}{%- else -%}{{ media[part.type] }}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{{ ' ' + call.function.name + ' ' + call.function.arguments | tojson }}
{%- endfor -%}
{{ '<|im_end|> ' if message.role == 'assistant' else ' ' }}
{%- endfor -%}
{{ 'assistant ' if add_generation_prompt else '' }}"""


def word_tokenizer(
    words: Sequence[str], markers: Mapping[MediaKind, str] | None = None, special: Collection[str] = ()
) -> PreTrainedTokenizerFast:
    """A tokenizer for ``words`` and the names of the roles; ``special`` tokens come besides end, padding and unknown.

    ``markers`` is what the chat template writes for a medium: its placeholder between its start and end tokens.
    """
    tokens = [PAD, END, UNKNOWN, *special]
    vocabulary = {t: i for i, t in enumerate(dict.fromkeys([*tokens, *ROLES, *words]))}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=plain,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=list(special),
        clean_up_tokenization_spaces=False,
    )
    written = "{%- set media = " + repr(dict(markers or {})) + " -%}\n"
    tokenizer.chat_template = written + _TEMPLATE
    return tokenizer
