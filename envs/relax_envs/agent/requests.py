"""A request for a reply: what is honoured, what changes nothing, and what is refused.

A setting that would change how replies are sampled must be the run's own, because the trainer computes log-probs of
that distribution. Another value is refused, or, where the run file says ``settings: ignore``, left out and named in
the response's header ``x-relax-ignored``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from relax_core.types import Message, Part, ToolSpec
from relax_envs.agent.content import messages_of
from relax_envs.agent.errors import ApiError, bad
from relax_envs.data.values import kind_name

if TYPE_CHECKING:
    from relax_core.types import Sampling

ANY_MODEL = "policy"
"""What the policy is called where agents may call it as they like."""

_READ = {"messages", "model", "tools", "tool_choice", "stream", "stream_options", "max_tokens", "max_completion_tokens"}
_NO_MATTER = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "timeout"}
"""They change no reply."""
_ONLY: dict[str, Any] = {
    "n": 1,
    "stop": [],
    "logprobs": False,
    "top_logprobs": 0,
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "functions": [],
}
"""What can be had only as it is by default."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What an agent may ask for. ``models``: the names of the policy; None: any."""

    sampling: Sampling
    models: tuple[str, ...] | None = None
    settings: Literal["refuse", "ignore"] = "refuse"

    @property
    def neutral(self) -> dict[str, Any]:
        """Settings of sampling, and the only value of each under which replies are sampled as the run says."""
        sampling = self.sampling
        return {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": 0,
            "seed": None,
            "presence_penalty": 0,
            "frequency_penalty": 0,
            "repetition_penalty": 1,
            "logit_bias": {},
            "parallel_tool_calls": True,
            "reasoning_effort": None,
            "verbosity": None,
        }


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that can be served."""

    messages: tuple[Message, ...]
    model: str
    max_new_tokens: int | None = None
    calls: bool = False
    """Whether tool calls are looked for in the reply."""
    stream: bool = False
    usage: bool = False
    """Whether a stream ends with the numbers of tokens."""
    ignored: tuple[str, ...] = field(default=())
    """Settings that were left out."""


def read(body: Any, rules: Rules) -> Asked:
    """Raises ApiError."""
    if not isinstance(body, Mapping):
        raise ApiError(400, f"the request is {kind_name(body)}; a JSON object is allowed")
    given = {key: value for key, value in body.items() if value is not None}
    ignored = tuple(_ignored(given, rules))
    tools = _tools(given.get("tools", []))
    unstrict = tuple(f"tools[{i}].function.strict" for i in _strict(given.get("tools", [])))
    if unstrict and rules.settings == "refuse":
        raise bad(unstrict[0], "true, but replies are sampled freely, not held to a schema; leave it out" + _HINT)
    return Asked(
        _declared(messages_of(given.get("messages")), tools),
        _model(given.get("model"), rules),
        _most_tokens(given),
        _may_call(given, tools),
        _flag(given, "stream"),
        _include_usage(given),
        ignored + unstrict,
    )


_HINT = ", or set the environment's settings: ignore"


def _ignored(given: Mapping[str, Any], rules: Rules) -> Iterator[str]:
    neutral = rules.neutral
    for name, value in given.items():
        if name in _READ or name in _NO_MATTER:
            continue
        if name in _ONLY:
            if value != _ONLY[name]:
                raise bad(name, f"{_short(value)} is not supported; {_short(_ONLY[name])} is allowed, or leave it out")
        elif name not in neutral:
            raise bad(name, "unknown, or not supported; leave it out")
        elif value != neutral[name]:
            if rules.settings == "refuse":
                allowed = "it cannot be set" if neutral[name] is None else f"the run samples with {neutral[name]}"
                raise bad(name, f"found {_short(value)}, but {allowed}: leave it out" + _HINT)
            yield name


def _model(value: Any, rules: Rules) -> str:
    if not isinstance(value, str) or not value:
        raise bad("model", "a name is needed, such as " + (rules.models or (ANY_MODEL,))[0])
    if rules.models is not None and value not in rules.models:
        raise no_model(value, rules)
    return value


def no_model(name: str, rules: Rules) -> ApiError:
    names = ", ".join(rules.models or (ANY_MODEL,))
    return ApiError(404, f"no model {name!r} here; there is {names}", "model_not_found", "model")


def _most_tokens(given: Mapping[str, Any]) -> int | None:
    """``max_tokens`` is the old name of ``max_completion_tokens``. More than the run samples is no error: the reply
    ends there, and its ``finish_reason`` says so."""
    found = {name: given[name] for name in ("max_completion_tokens", "max_tokens") if name in given}
    for name, value in found.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise bad(name, f"found {_short(value)}; a whole number from 1 is allowed")
    if len(set(found.values())) > 1:
        raise bad("max_tokens", "it is not max_completion_tokens, which is its new name; give one of them")
    return next(iter(found.values()), None)


def _flag(given: Mapping[str, Any], name: str, where: str = "") -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise bad(where + name, f"found {_short(value)}; true and false are allowed")
    return value


def _include_usage(given: Mapping[str, Any]) -> bool:
    options = given.get("stream_options", {})
    if not isinstance(options, Mapping) or not options.keys() <= {"include_usage", "include_obfuscation"}:
        raise bad("stream_options", f"found {_short(options)}; an object with include_usage is allowed")
    return _flag({k: v for k, v in options.items() if v is not None}, "include_usage", "stream_options.")


# --- tools ------------------------------------------------------------------------------------------------------------


def _tools(value: Any) -> list[ToolSpec]:
    if not isinstance(value, list):
        raise bad("tools", f"{kind_name(value)}; a list of functions is allowed")
    found = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(value)]
    if len({tool.name for tool in found}) < len(found):
        raise bad("tools", "two tools have one name; give each its own")
    return found


def _tool(tool: Any, where: str) -> ToolSpec:
    function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
    if not isinstance(function, Mapping):
        raise bad(where, "{'type': 'function', 'function': {...}} is allowed")
    name, parameters = function.get("name"), function.get("parameters") or {"type": "object", "properties": {}}
    described = function.get("description") or ""
    if not isinstance(name, str) or not name:
        raise bad(f"{where}.function.name", "a name is needed")
    if not isinstance(described, str) or not isinstance(parameters, Mapping):
        raise bad(f"{where}.function", "its description is text, its parameters are a JSON schema")
    return ToolSpec(name, described, dict(parameters))


def _strict(tools: Sequence[Any]) -> Iterator[int]:
    return (i for i, tool in enumerate(tools) if tool["function"].get("strict"))


def _may_call(given: Mapping[str, Any], tools: Sequence[ToolSpec]) -> bool:
    """``none`` changes nothing of what the policy reads, so that the conversation goes on: calls are left as text."""
    choice = given.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise bad("tool_choice", f"found {_short(choice)}; auto and none are allowed: a call cannot be forced")
    return bool(tools) and choice == "auto"


def _declared(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> tuple[Message, ...]:
    """Tools stand in the first system message."""
    if not tools:
        return tuple(messages)
    parts: tuple[Part, ...] = ()
    if messages[0].role == "system":
        parts, messages = messages[0].parts, messages[1:]
    return (Message("system", (*parts, *tools)), *messages)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + " ..."
