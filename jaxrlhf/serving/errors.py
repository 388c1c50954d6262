"""Errors of the API in OpenAI's form."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jaxrlhf.config import Refusal
from jaxrlhf.episode import EnvironmentFailure

logger = logging.getLogger(__name__)


class ApiError(Exception):
    """Error answer to a request.

    Attributes:
      kind: OpenAI's `type`, such as `invalid_request_error`.
      code: Machine-readable cause.
      param: Name of the wrong field of the request.
    """

    def __init__(
        self, message: str, *, status: int = 400, kind: str = "invalid_request_error", code: str, param: str = ""
    ) -> None:
        super().__init__(message)
        self.message, self.param = (text.encode(errors="replace").decode() for text in (message, param))
        self.status, self.kind, self.code = status, kind, code

    @property
    def body(self) -> dict[str, Any]:
        """Body of the answer, as OpenAI's clients read it."""
        error = {"message": self.message, "type": self.kind, "code": self.code, "param": self.param or None}
        return {"error": error}


def invalid(message: str, param: str) -> ApiError:
    """Return the error for a field with an invalid value."""
    return ApiError(message, code="invalid_value", param=param)


def unsupported(message: str, param: str) -> ApiError:
    """Return the error for a field that requests an unsupported feature."""
    return ApiError(message, code="unsupported_parameter", param=param)


def server_error(error: Exception) -> ApiError:
    """Log a failure that is no fault of the request, and return the error for it."""
    logger.error("a request failed", exc_info=error)
    message = f"the server failed at this request ({type(error).__name__}); its log says more"
    return ApiError(message, status=500, kind="server_error", code="internal_error")


@contextmanager
def refusals(param: str) -> Iterator[None]:
    """Convert refusals inside the block to an `ApiError` of a request field."""
    try:
        yield
    except EnvironmentFailure as error:
        raise invalid(f"the chat template refuses the messages: {error.detail}", param) from error
    except Refusal as error:
        raise invalid(str(error), param) from error
    except RecursionError as error:
        raise invalid("values are nested too deep; send flatter ones", param) from error


TOO_LONG = "context_length_exceeded"


def too_long(message: str) -> ApiError:
    """Return the error for a prompt and response that do not fit the model's context."""
    return ApiError(message, code=TOO_LONG, param="messages")
