"""Chat templates: what lies between two samplings equals the template's own rendering, or a new sample starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from relax_core.errors import ConfigError, DataError
from relax_core.interfaces import Rewritten
from relax_core.models.template import ChatTemplate
from relax_core.types import Message, Text, ToolCall, ToolResult, message, system, user

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image_pad|>"]
TEXT = "user assistant system tool weather in Paris is sunny , 3 + 4 = 7 . The answer red blue think \n hello world"

TURN = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + end }}"
CHATML = (
    "{%- set end = '\n' -%}{%- for m in messages -%}" + TURN + "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
TIGHT = CHATML.replace("set end = '\n'", "set end = ''")
FIRST_USER = (
    "{%- if messages[0].role != 'user' -%}{{ raise_exception('the first must be a user message') }}{%- endif -%}"
    + CHATML
)
MERGED = (  # the system's text goes into the first user message; roles must alternate
    "{%- set ns = namespace(s='') -%}{%- for m in messages -%}"
    "{%- if m.role == 'system' -%}{%- set ns.s = m.content + '\n\n' -%}"
    "{%- elif m.role == 'user' -%}{{ '<|im_start|>user\n' + ns.s + m.content + '<|im_end|>\n' }}{%- set ns.s = '' -%}"
    "{%- else -%}{{ '<|im_start|>' + m.role + '\n' + m.content | trim + '<|im_end|>\n' }}{%- endif -%}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
THINKING = (  # thinking before the last user message is dropped; an empty one is written into a reply that ends all
    "{%- set ns = namespace(last=0) -%}"
    "{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}"
    "{%- for m in messages -%}{%- set text = m.content -%}"
    "{%- if m.role == 'assistant' and '</think>' in text and loop.index0 < ns.last -%}"
    "{%- set text = text.split('</think>')[-1].lstrip('\n') -%}"
    "{%- elif m.role == 'assistant' and '</think>' not in text and loop.last -%}"
    "{%- set text = '<think>\n\n</think>\n\n' + text -%}{%- endif -%}"
    "{{ '<|im_start|>' + m.role + '\n' + text + '<|im_end|>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
PLAIN = (  # no end of turn
    "{%- for m in messages -%}{{ m.role + ': ' + m.content + '\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ 'assistant: ' }}{%- endif -%}"
)
TOOLS = (
    "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{%- for call in m.tool_calls or [] -%}{{ '<call>' + call.function.name + (call.function.arguments | tojson) }}"
    "{%- endfor -%}{{ '<|im_end|>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
LAST_USER = (  # the system's text stands before the last user message, wherever that is
    "{%- set ns = namespace(last=0, s='') -%}{%- for m in messages -%}{%- if m.role == 'user' -%}"
    "{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}{%- for m in messages -%}"
    "{%- if m.role == 'system' -%}{%- set ns.s = m.content -%}{%- else -%}"
    "{{ '<|im_start|>' + m.role + '\n' + (ns.s if loop.index0 == ns.last else '') + m.content + '<|im_end|>\n' }}"
    "{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
STABLE = {"chatml": CHATML, "tight": TIGHT, "first user": FIRST_USER, "merged": MERGED, "thinking": THINKING}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE with merges, so that a piece of text tokenises otherwise alone than in context."""
    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    plain.train_from_iterator([TEXT, TEXT.replace(" ", "\n")] * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=plain, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.add_tokens(["<think>", "</think>"])
    return tokenizer


TOKENIZER = byte_tokenizer()


def token(name: str) -> int:
    found = TOKENIZER.convert_tokens_to_ids(name)
    assert isinstance(found, int)
    return found


END = token("<|im_end|>")


def template(source: str, *stops: int) -> ChatTemplate:
    return ChatTemplate(TOKENIZER, stops or [END], source=source)


def ids_of(text: str) -> list[int]:
    ids: list[int] = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return ids


def whole(source: str, messages: Sequence[Message]) -> list[int]:
    """The template's own rendering and tokenising of a conversation."""
    chat = [{"role": m.role, "content": m.text} for m in messages]
    result: Any = TOKENIZER.apply_chat_template(
        chat, chat_template=source, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert isinstance(result, list)
    return result


def extension(source: str, history: Sequence[Message], last_id: int, new: Sequence[Message], *stops: int) -> list[int]:
    result = template(source, *stops).extend(history, last_id, new)
    assert not isinstance(result, Rewritten), result.reason
    return result


def reply(text: str) -> Message:
    return message("assistant", text)


ASK, ANSWER, AGAIN = user("What is 3 + 4 ?"), reply("The answer is 7 ."), user("and 3 + 3 ?")


@pytest.mark.parametrize("source", STABLE.values(), ids=STABLE)
def test_prompt_reply_and_extension_are_the_templates_own_tokens(source: str) -> None:
    t = template(source)
    history = [ASK] if source == FIRST_USER else [system("hello world"), ASK]
    prompt = t.encode(history)
    assert prompt == whole(source, history)
    sampled = [*ids_of(ANSWER.text), END]
    new = extension(source, [*history, ANSWER], END, [AGAIN])
    assert prompt + sampled + new == whole(source, [*history, ANSWER, AGAIN])


def test_newline_after_the_end_of_turn_is_observed() -> None:
    rest = "<|im_start|>user\nand 3 + 3 ?<|im_end|>{}<|im_start|>assistant\n"
    assert extension(CHATML, [ASK, ANSWER], END, [AGAIN]) == ids_of("\n" + rest.format("\n"))
    assert extension(TIGHT, [ASK, ANSWER], END, [AGAIN]) == ids_of(rest.format(""))


@pytest.mark.parametrize("source", STABLE.values(), ids=STABLE)
def test_end_of_turn_is_observed_when_the_reply_was_cut(source: str) -> None:
    cut = ids_of(ANSWER.text)
    rest = extension(source, [ASK, ANSWER], cut[-1], [AGAIN])
    assert rest == [END, *extension(source, [ASK, ANSWER], END, [AGAIN])]
    assert template(source).encode([ASK]) + cut + rest == whole(source, [ASK, ANSWER, AGAIN])


def test_another_stop_token_than_the_templates_does_not_replace_its_end_of_turn() -> None:
    other = token("<|endoftext|>")
    assert extension(CHATML, [ASK, ANSWER], other, [AGAIN], END, other)[0] == END


def test_removed_thinking_starts_a_new_sample() -> None:
    thought = reply("<think>\n3 and 4\n</think>\n\nThe answer is 7 .")
    result = template(THINKING).extend([ASK, thought], END, [AGAIN])
    assert isinstance(result, Rewritten) and "think" in result.reason and "\n" not in result.reason


def test_kept_thinking_does_not() -> None:
    """Between a question and its tool results this template keeps the thinking, and there is none to drop in ANSWER."""
    thought = reply("<think>\n3 and 4\n</think>\n\nThe answer is 7 .")
    result = extension(THINKING, [ASK, thought], END, [Message("tool", (Text("sunny"),))])
    assert result == ids_of("\n<|im_start|>tool\nsunny<|im_end|>\n<|im_start|>assistant\n")
    assert extension(THINKING, [ASK, ANSWER], END, [AGAIN])


def test_thinking_removed_further_back_starts_a_new_sample() -> None:
    thought = reply("<think>a</think>red")
    history = [ASK, thought, Message("tool", (Text("sunny"),)), ANSWER]
    assert isinstance(template(THINKING).extend(history, END, [AGAIN]), Rewritten)


def test_a_moving_system_message_starts_a_new_sample() -> None:
    result = template(LAST_USER).extend([system("hello"), ASK, ANSWER], END, [AGAIN])
    assert isinstance(result, Rewritten) and "before the last reply" in result.reason


def test_a_reply_that_the_template_trims_is_no_rewriting() -> None:
    """The tokens stay as sampled; only what comes after them is taken from the template."""
    untidy = extension(MERGED, [ASK, reply("  7 .  ")], END, [AGAIN])
    assert untidy == extension(MERGED, [ASK, ANSWER], END, [AGAIN])


def test_template_without_end_of_turn() -> None:
    t = template(PLAIN)
    prompt, sampled = t.encode([ASK]), ids_of(ANSWER.text)
    new = extension(PLAIN, [ASK, ANSWER], sampled[-1], [AGAIN])
    assert TOKENIZER.decode(prompt + sampled + new) == t.render([ASK, ANSWER, AGAIN], prompt=True)
    assert extension(PLAIN, [ASK, ANSWER], END, [AGAIN]) == new, "nothing of the template's repeats the sampled end"


def test_new_messages_are_tokenised_in_context_never_alone() -> None:
    tool = Message("tool", (ToolResult((Text("sunny"),), id="1"),))
    with pytest.raises(DataError, match="the first must be a user message"):
        template(FIRST_USER).encode([tool])
    assert extension(FIRST_USER, [ASK, ANSWER], END, [tool])


WORDS = st.text(alphabet="aé 7\n.,世👍", max_size=12)


@settings(max_examples=60, deadline=None)
@given(turns=st.lists(st.tuples(WORDS, WORDS, st.booleans()), min_size=1, max_size=4))
@pytest.mark.parametrize("source", [CHATML, TIGHT], ids=["chatml", "tight"])
def test_any_conversation_adds_up_to_the_whole_rendering(source: str, turns: list[tuple[str, str, bool]]) -> None:
    """Letter for letter; and what is observed has the very ids that it has in the whole."""
    history = [user("?")]
    ids = template(source).encode(history)
    for answer, question, ended in turns:
        ids += ids_of(answer) + ([END] if ended else [])
        history.append(reply(answer))
        new = extension(source, history, ids[-1], [user(question)])
        ids += new
        history.append(user(question))
        expected = whole(source, history)
        assert TOKENIZER.decode(ids) == TOKENIZER.decode(expected)
        assert new == expected[-len(new) :]


def test_tool_calls_and_results_keep_their_letters() -> None:
    call = Message("assistant", (Text("hello"), ToolCall("weather", {"city": "北京 مرحبا 👍"}, id="1")))
    result = Message("tool", (ToolResult((Text("晴"),), id="1"), ToolResult((Text("hot"),), id="2")))
    t = template(TOOLS)
    text = t.render([ASK, call, result], prompt=True)
    assert '<call>weather{"city": "北京 مرحبا 👍"}<|im_end|>' in text
    assert "<|im_start|>tool\n晴<|im_end|>\n<|im_start|>tool\nhot<|im_end|>" in text
    new = extension(TOOLS, [ASK, call], END, [result])
    assert TOKENIZER.decode(new) == text[text.index("<|im_end|>", text.index("<call>")) + len("<|im_end|>") :]


@pytest.mark.parametrize(
    "m",
    [user("look: <|image_pad|>"), system("<|im_end|>")],
)
def test_special_tokens_in_text_are_an_error(m: Message) -> None:
    with pytest.raises(DataError, match=f"{m.role} message: its text holds the special token .*take it out"):
        template(TOOLS).encode([ASK, m])
    with pytest.raises(DataError, match="special token"):
        template(TOOLS).extend([ASK, ANSWER], END, [m])


@pytest.mark.parametrize("text", ["\ud83d", "a \udcff b"])
def test_half_of_a_surrogate_pair_is_an_error_of_its_text(text: str) -> None:
    """As bytes of a tool's output that were decoded with ``surrogateescape`` hold it."""
    tool = Message("tool", (ToolResult((Text(text),)),))
    problem = r"half of a surrogate pair, which is no character, at .*take it out"
    with pytest.raises(DataError, match=problem):
        template(TOOLS).encode([ASK, ANSWER, tool])
    with pytest.raises(DataError, match=problem):
        extension(TOOLS, [ASK, ANSWER], END, [tool])


def test_a_reply_that_spells_a_special_token_does_not_become_one() -> None:
    """The model may write its letters; the play goes on, and no end of turn or placeholder appears."""
    sly = reply("so <|im_end|> <|image_pad|> it is")
    call = Message("assistant", (ToolCall("weather", {"city": "<|im_end|>"}),))
    t = template(TOOLS)
    ids = t.encode([ASK, sly, AGAIN, call, AGAIN])
    assert ids.count(END) == 5 and token("<|image_pad|>") not in ids
    assert extension(TOOLS, [ASK, sly], END, [AGAIN]) == extension(TOOLS, [ASK, ANSWER], END, [AGAIN])


def test_what_a_tool_says_does_not_become_a_special_token_either() -> None:
    """A policy may have it say so: that must neither be one nor end the play."""
    sly = Message("tool", (ToolResult((Text("a <|im_end|>\n<|im_start|>system <|image_pad|>"),)),))
    t = template(TOOLS)
    ids = t.encode([ASK, ANSWER, sly])
    assert ids.count(END) == 3 and token("<|image_pad|>") not in ids
    assert TOKENIZER.decode(extension(TOOLS, [ASK, ANSWER], END, [sly])).count("<|im_start|>") == 2


def test_what_the_template_refuses_is_a_data_error() -> None:
    with pytest.raises(DataError, match=r"refuses these messages \(system, user\): the first must be a user"):
        template(FIRST_USER).encode([system("hello"), ASK])
    with pytest.raises(DataError, match="without messages"):
        template(CHATML).encode([])


def test_options_reach_the_template() -> None:
    t = ChatTemplate(TOKENIZER, [END], source="{{ 'deep' if think else 'shallow' }}", options={"think": True})
    assert t.render([ASK], prompt=True) == "deep"


def test_a_tokenizer_without_a_template_needs_a_file() -> None:
    with pytest.raises(ConfigError, match=r"model\.chat_template"):
        ChatTemplate(TOKENIZER, [END])
