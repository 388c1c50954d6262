"""Errors of the API in OpenAI's form."""

from typing import Any


class ApiError(Exception):
    """Answer to a request that cannot be served.

    Attributes:
      status: HTTP status.
      kind: OpenAI's `type`, such as `invalid_request_error`.
      code: Word for programs.
      param: Field of the request that is wrong.
    """

    def __init__(
        self, message: str, *, status: int = 400, kind: str = "invalid_request_error", code: str, param: str = ""
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.kind, self.code, self.param = message, status, kind, code, param

    @property
    def body(self) -> dict[str, Any]:
        """The error as OpenAI's clients read it."""
        error = {"message": self.message, "type": self.kind, "code": self.code, "param": self.param or None}
        return {"error": error}


def invalid(message: str, param: str) -> ApiError:
    """A field of a request has a value that it cannot have."""
    return ApiError(message, code="invalid_value", param=param)


def unsupported(message: str, param: str) -> ApiError:
    """A field asks for what this server does not do."""
    return ApiError(message, code="unsupported_parameter", param=param)


def too_long(message: str) -> ApiError:
    """Prompt and response do not fit the model's context."""
    return ApiError(message, code="context_length_exceeded", param="messages")
