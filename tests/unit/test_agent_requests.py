"""What an agent's request may say: messages of every kind, settings that are honoured, clear errors for the rest."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from relax_core.types import Audio, Image, Message, Sampling, Text, ToolCall, ToolResult, ToolSpec, Video, message, user
from relax_envs.agent.errors import ApiError
from relax_envs.agent.requests import Asked, Rules, read

RULES = Rules(Sampling(temperature=0.7, max_new_tokens=9))
HELLO = [{"role": "user", "content": "hello"}]
ADD = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}}
BYTES = b"\x89PNG and more"
CODED = base64.b64encode(BYTES).decode()


def asked(rules: Rules = RULES, messages: Any = HELLO, **body: Any) -> Asked:
    return read({"model": "any", "messages": messages} | body, rules)


def refusal(rules: Rules = RULES, **body: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        asked(rules, **body)
    assert "\n" not in caught.value.message
    return caught.value


# --- messages ---------------------------------------------------------------------------------------------------------


def test_roles_and_text() -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "what"}, {"type": "text", "text": "?"}]},
        {"role": "assistant", "content": "hm", "refusal": None, "annotations": [], "audio": None},
        {"role": "user", "content": "北京"},
    ]
    assert asked(messages=messages).messages == (
        message("system", "be brief"),
        message("user", "what", "?"),
        message("assistant", "hm"),
        user("北京"),
    )


def test_media_are_inside_the_request() -> None:
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{CODED}", "detail": "high"}},
        {"type": "input_audio", "input_audio": {"data": CODED, "format": "wav"}},
        {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{CODED}"}},
    ]
    (said,) = asked(messages=[{"role": "user", "content": parts}]).messages
    assert said.parts == (Image(BYTES), Audio(BYTES), Video(BYTES))


def test_calls_and_their_results() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": "é"}'}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "7"},
    ]
    assert asked(messages=messages).messages[1:] == (
        Message("assistant", (ToolCall("add", {"a": "é"}, "c1"),)),
        Message("tool", (ToolResult((Text("7"),), "c1"),)),
    )


def test_tools_stand_in_the_first_system_message() -> None:
    tools, spec = [{"type": "function", "function": ADD}], ToolSpec("add", "Adds.", ADD["parameters"])  # type: ignore[arg-type]
    alone = asked(tools=tools)
    assert alone.messages == (Message("system", (spec,)), user("hello")) and alone.calls
    told = asked(messages=[{"role": "system", "content": "be brief"}, *HELLO], tools=tools, tool_choice="none")
    assert told.messages[0] == message("system", "be brief", spec) and not told.calls
    assert not asked().calls


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        (["hello"], "messages[0]"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": 7}], "messages[0].content"),
        ([{"role": "user", "content": "x", "name": "Eve"}], "messages[0].name"),
        ([{"role": "user", "content": "half \ud83d"}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "file"}]}], "messages[0].content[0].type"),
        ([*HELLO, {"role": "assistant", "content": "and so"}], "messages[1].role"),
        ([{"role": "assistant", "content": "x", "reasoning_content": "y"}, *HELLO], "messages[0].reasoning_content"),
        ([{"role": "tool", "content": "7"}], "messages[0].tool_call_id"),
        ([{"role": "user", "content": "x", "tool_calls": [1]}], "messages[0].tool_calls"),
    ],
)
def test_messages_that_cannot_be_read(messages: Any, param: str) -> None:
    error = refusal(messages=messages)
    assert error.status == 400 and error.param == param and error.body["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("https://example.com/x.png", "nothing is fetched"),
        ("data:image/png;base64,%%%", "not base64"),
        ("", "no data:"),
    ],
)
def test_media_that_cannot_be_read(url: str, words: str) -> None:
    part = {"type": "image_url", "image_url": {"url": url}}
    error = refusal(messages=[{"role": "user", "content": [part]}])
    assert error.param == "messages[0].content[0].image_url.url" and words in error.message


@pytest.mark.parametrize("arguments", ["[1]", "{", "7", "{'a': 1}"])
def test_arguments_that_are_no_object_never_become_an_empty_one(arguments: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}
    error = refusal(messages=[{"role": "assistant", "tool_calls": [call]}, *HELLO])
    assert error.param == "messages[0].tool_calls[0].function.arguments"


# --- settings ---------------------------------------------------------------------------------------------------------


def test_the_runs_own_settings_may_be_said() -> None:
    found = asked(temperature=0.7, top_p=1, n=1, seed=None, stop=None, presence_penalty=0.0, user="u", store=True)
    assert found.ignored == ()


@pytest.mark.parametrize(
    "setting",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"top_p": 0.9},
        {"seed": 7},
        {"frequency_penalty": 0.5},
        {"top_k": 4},
        {"logit_bias": {"7": 1}},
        {"reasoning_effort": "low"},
        {"parallel_tool_calls": False},
    ],
)
def test_another_sampling_is_refused_or_named(setting: dict[str, Any]) -> None:
    (name,) = setting
    error = refusal(**setting)
    assert error.param == name and "settings: ignore" in error.message
    lenient = Rules(RULES.sampling, settings="ignore")
    assert asked(lenient, **setting).ignored == (name,)


@pytest.mark.parametrize(
    "setting",
    [
        {"n": 2},
        {"stop": ["\n"]},
        {"logprobs": True},
        {"response_format": {"type": "json_object"}},
        {"colour": "red"},
        {"tool_choice": "required"},
        {"stream": "yes"},
        {"stream_options": {"x": 1}},
        {"max_tokens": 0},
        {"max_tokens": 1.5},
        {"functions": [ADD]},
        {"modalities": ["audio"]},
    ],
)
@pytest.mark.parametrize("settings", ["refuse", "ignore"])
def test_what_cannot_be_had_is_always_refused(setting: dict[str, Any], settings: Any) -> None:
    error = refusal(Rules(RULES.sampling, settings=settings), **setting)
    assert error.status == 400 and error.param in setting


def test_a_strict_schema_is_not_promised() -> None:
    tools = [{"type": "function", "function": ADD | {"strict": True}}]
    assert refusal(tools=tools).param == "tools[0].function.strict"
    assert asked(Rules(RULES.sampling, settings="ignore"), tools=tools).ignored == ("tools[0].function.strict",)


def test_the_most_tokens_of_a_reply() -> None:
    assert asked().max_new_tokens is None
    assert asked(max_tokens=5).max_new_tokens == asked(max_completion_tokens=5).max_new_tokens == 5
    assert asked(max_tokens=5, max_completion_tokens=5).max_new_tokens == 5
    assert refusal(max_tokens=5, max_completion_tokens=6).param == "max_tokens"


def test_the_name_of_the_policy() -> None:
    named = Rules(RULES.sampling, models=("small", "large"))
    assert asked(named, model="large").model == "large"
    error = refusal(named, model="gpt")
    assert error.status == 404 and error.code == "model_not_found" and "small, large" in error.message
    assert refusal(model="").param == "model"


@pytest.mark.parametrize(
    "tool", [7, {"type": "web_search"}, {"type": "function"}, {"type": "function", "function": {}}]
)
def test_tools_that_cannot_be_declared(tool: Any) -> None:
    assert str(refusal(tools=[tool]).param).startswith("tools[0]")


def test_tools_have_names_of_their_own() -> None:
    assert refusal(tools=[{"type": "function", "function": ADD}] * 2).param == "tools"
