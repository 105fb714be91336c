"""Conversations through chat templates written as those of released models: played for real, with given replies.

folder = model_folder(tmp_path)                  # a tokenizer with the special tokens of all families
table = Table(folder, QWEN3)
table.say(user("what"), reply="hello")           # the engine answers these tokens and the end of turn
table.sample.ids, table.whole(("user", "what"))
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_core.chat import Chat, Seat
from relax_core.interfaces import Completion, Engine, Interrupt, Request
from relax_core.media import MediaStore
from relax_core.types import Message, Role, Sample, Sampling, Stop, Version

if TYPE_CHECKING:
    from relax_core.weights import WeightUpdate

IM_START, IM_END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
HEADER, HEADER_END, EOT, BEGIN = "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|begin_of_text|>"
TURN, TURN_END, BOS = "<start_of_turn>", "<end_of_turn>", "<bos>"
SPECIAL = [PAD, IM_START, IM_END, HEADER, HEADER_END, EOT, BEGIN, TURN, TURN_END, BOS]
TEXT = "user assistant system tool model weather in Paris is sunny , 3 + 4 = 7 . The answer think hello get what how"

ASSISTANT = "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
PLAIN_TURN = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
CHATML = "{%- for m in messages -%}" + PLAIN_TURN + "{%- endfor -%}" + ASSISTANT
NEEDS_SYSTEM = (
    "{%- if messages[0].role != 'system' -%}{{ raise_exception('the system speaks first') }}{%- endif -%}" + CHATML
)
NEEDS_USER = "{%- if messages[0].role != 'user' -%}{{ raise_exception('the user speaks first') }}{%- endif -%}" + CHATML
OWN_SYSTEM = (  # as Qwen2.5: one who gives no system message gets the template's
    "{%- if messages[0].role != 'system' -%}{{ '<|im_start|>system\nhello<|im_end|>\n' }}{%- endif -%}" + CHATML
)
LLAMA3 = (
    "{{- bos_token -}}{%- for m in messages -%}{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' -}}"
    "{{- m.content | trim + '<|eot_id|>' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}{%- endif -%}"
)
GEMMA = (  # the system's text goes into the first user turn; roles must alternate
    "{{- '<bos>' -}}{%- set ns = namespace(system='', seen=0) -%}{%- for m in messages -%}"
    "{%- if m.role == 'system' -%}{%- set ns.system = m.content + '\n\n' -%}{%- else -%}"
    "{%- if (m.role == 'user') != (ns.seen % 2 == 0) -%}{{ raise_exception('roles must alternate') }}{%- endif -%}"
    "{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' -}}"
    "{{- (ns.system if ns.seen == 0 else '') + m.content | trim + '<end_of_turn>\n' -}}"
    "{%- set ns.seen = ns.seen + 1 -%}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<start_of_turn>model\n' -}}{%- endif -%}"
)
QWEN3 = (  # thinking stays between a question and its tool results, and goes when the user speaks again
    "{%- set ns = namespace(asked=-1) -%}{%- for m in messages -%}{%- if m.role == 'user' -%}"
    "{%- set ns.asked = loop.index0 -%}{%- endif -%}{%- endfor -%}{%- for m in messages -%}"
    "{%- if m.role == 'tool' -%}"
    "{%- if loop.first or loop.previtem.role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}"
    "{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' -}}"
    "{%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}"
    "{%- elif m.role == 'assistant' -%}{%- set thought, said = '', m.content -%}{%- if '</think>' in said -%}"
    "{%- set thought = said.split('</think>')[0].split('<think>')[-1].strip('\n') -%}"
    "{%- set said = said.split('</think>')[-1].lstrip('\n') -%}{%- endif -%}{{- '<|im_start|>assistant\n' -}}"
    "{%- if loop.index0 > ns.asked and (loop.last or thought) -%}"
    "{{- '<think>\n' + thought + '\n</think>\n\n' -}}{%- endif -%}{{- said -}}"
    '{%- for call in m.tool_calls or [] -%}{{- \'\n<tool_call>\n{"name": "\' + call.function.name -}}'
    "{{- '\", \"arguments\": ' -}}{{- call.function.arguments | tojson -}}{{- '}\n</tool_call>' -}}{%- endfor -%}"
    "{{- '<|im_end|>\n' -}}{%- else -%}" + PLAIN_TURN + "{%- endif -%}{%- endfor -%}" + ASSISTANT
)
OPENS_THINKING = QWEN3.replace(
    "{{ '<|im_start|>assistant\n' }}{%- endif", "{{ '<|im_start|>assistant\n<think>\n' }}{%- endif"
)
MEDIA = {
    "image": "<|vision_start|><|image_pad|><|vision_end|>",
    "audio": "<|audio_start|><|audio_pad|><|audio_end|>",
    "video": "<|vision_start|><|video_pad|><|vision_end|>",
}


def with_media(source: str) -> str:
    """The template for messages that hold media as well, which it marks as Qwen3-Omni's does."""
    shown = (
        "{%- macro shown(content) -%}{%- if content is string -%}{{ content }}{%- else -%}{%- for part in content -%}"
        "{{ part.text if part.type == 'text' else " + repr(MEDIA) + "[part.type] }}{%- endfor -%}{%- endif -%}"
        "{%- endmacro -%}"
    )
    return shown + source.replace("m.content", "shown(m.content)")


def model_folder(folder: Path) -> Path:
    """Write the tokenizer and the config of a model into ``folder``; no weights. All ends of turn stop a reply."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config

    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=440, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    plain.train_from_iterator([TEXT, TEXT.replace(" ", "\n")] * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=plain, bos_token=BEGIN, eos_token=IM_END, pad_token=PAD
    )
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    tokenizer.save_pretrained(folder)
    stops = tokenizer.convert_tokens_to_ids([IM_END, EOT, TURN_END])
    Qwen3Config(vocab_size=len(tokenizer), num_hidden_layers=1, eos_token_id=stops).save_pretrained(folder)
    return folder


class Table:
    """A chat over a template, and what is said at it. Replies are given as text, or as ids."""

    def __init__(self, folder: Path, source: str, end: str = IM_END) -> None:
        from relax_core.models.config import TextConfig
        from relax_core.models.text import TextAdapter

        file = folder / "used.jinja"
        file.write_text(source)
        self.source, self.answers = source, list[list[int]]()
        config = TextConfig(path=folder, chat_template=file)
        self.adapter = TextAdapter(config, MediaStore({}, 0))
        self.end = self.ids(end)
        self.chat = Chat(Answers(self.answers), self.adapter, Sampling(max_new_tokens=9), Seat(0, "t", 0, 0, ()))

    def ids(self, text: str) -> list[int]:
        return [int(i) for i in self.adapter.tokenizer(text, add_special_tokens=False)["input_ids"]]

    def say(self, *new: Message, reply: str | Sequence[int]) -> str:
        self.answers.append([*(self.ids(reply) if isinstance(reply, str) else reply), *self.end])
        return asyncio.run(self.chat(*new)).text

    def whole(self, *messages: tuple[Role, str]) -> list[int]:
        """The template's own rendering and tokenising of a conversation."""
        chat = [{"role": role, "content": text} for role, text in messages]
        found: Any = self.adapter.tokenizer.apply_chat_template(
            chat, chat_template=self.source, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return [int(i) for i in found]

    @property
    def sample(self) -> Sample:
        (sample,) = self.chat.samples
        return sample

    def trained(self, sample: Sample) -> str:
        return self.text([i for i, m in zip(sample.ids, sample.mask, strict=True) if m])

    def text(self, ids: Sequence[int]) -> str:
        text = self.adapter.tokenizer.decode(list(ids), skip_special_tokens=False)
        assert isinstance(text, str)
        return text


class Answers(Engine):
    """Answers with the ids in a list, in order."""

    def __init__(self, answers: list[list[int]]) -> None:
        super().__init__(None)
        self.answers = answers

    async def generate(self, request: Request) -> Completion:
        ids = self.answers.pop(0)
        return Completion(ids, [-0.5] * len(ids), [Version(0, 3)] * len(ids), Stop.EOS)

    async def load_weights(self, update: WeightUpdate, interrupt: Interrupt = "continue") -> None: ...

    async def health(self) -> Mapping[str, float]:
        return {}
