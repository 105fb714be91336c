"""Errors that an agent's client gets, shaped as OpenAI's, and errors of a play that an agent caused."""

from __future__ import annotations

from typing import Any

from relax_core.errors import RelaxError

_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """``status``: of HTTP. ``code``: for programs. ``param``: the field of the request that it is about. ``again``:
    whether the same request may be served later; clients ask again by themselves then."""

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None, again: bool = False
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.again = status, message, code, param, again

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad(param: str, message: str) -> ApiError:
    """What a request says in ``param`` cannot be used."""
    return ApiError(400, f"{param}: {message}", "invalid_value", param)


class AgentError(RelaxError):
    """The agent failed: its play is an error, and is not trained. The class's name is the error's type."""


class AgentExit(AgentError):
    """Its command ended with another exit code than 0, or could not be started."""


class AgentDeadline(AgentError):
    """Its command was still running at the deadline."""


class AgentSilent(AgentError):
    """It ended without a reply of the policy."""


class AgentResult(AgentError):
    """Its result file cannot be read."""
