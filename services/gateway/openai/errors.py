"""A `MeshError` as clients of OpenAI's API expect it: one nested object, `code` a string or null.

Source: OpenAI API reference, "Error codes"; the SDKs read `error.message` and nothing else when
the shape differs.
"""

from typing import Any, ClassVar

import msgspec

from shared.errors import InvalidRequest, MeshError, NotFound

TYPES: dict[int, str] = {
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    408: "timeout_error",
    504: "timeout_error",
}
"""HTTP status -> `type`; everything else is the client's fault."""

CODES: dict[str, str | None] = {
    "invalid_request": None,
    "unauthorized": "invalid_api_key",
    "overloaded": "rate_limit_exceeded",
    "internal": "internal_error",
}
"""Our code -> OpenAI's `code`; a code that is not here travels as it is."""


class PayloadTooLarge(InvalidRequest):
    """The body, or the prompt in it, is over a limit of this gateway."""

    status: ClassVar[int] = 413
    openai_code: ClassVar[str] = "payload_too_large"


class BodyTimeout(InvalidRequest):
    """The client did not send the whole body in time."""

    status: ClassVar[int] = 408
    openai_code: ClassVar[str] = "request_timeout"


class UnknownModel(NotFound):
    """The request names a model that this mesh does not serve."""

    openai_code: ClassVar[str] = "model_not_found"

    def __init__(self, model: str) -> None:
        super().__init__(f"The model `{model}` does not exist.", param="model")


class MethodNotAllowed(InvalidRequest):
    """The path exists, the method does not."""

    status: ClassVar[int] = 405
    openai_code: ClassVar[str] = "method_not_allowed"


def error_object(error: MeshError) -> dict[str, Any]:
    """The value of the key `error`."""
    code: str | None = getattr(error, "openai_code", None) or CODES.get(error.code, error.code)
    return {
        "message": error.detail,
        "type": TYPES.get(error.status, "invalid_request_error"),
        "param": error.param,
        "code": code,
    }


def error_body(error: MeshError) -> bytes:
    """The whole JSON body, also the payload of an error event in a stream."""
    return msgspec.json.encode({"error": error_object(error)})
