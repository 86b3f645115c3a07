"""Errors, typed by whose fault they are. Only code and detail travel, never a pickled exception."""

from typing import ClassVar, Literal

Code = Literal[
    "invalid_request",
    "context_length_exceeded",
    "unauthorized",
    "not_found",
    "overloaded",
    "deadline_exceeded",
    "unavailable",
    "cancelled",
    "internal",
]


class MeshError(Exception):
    """Root of every error that a client may be told about.

    `param` names the field at fault, when there is one; `retry_after_s` is advice for a later try.
    """

    code: ClassVar[Code] = "internal"
    status: ClassVar[int] = 500

    def __init__(
        self, detail: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.param = param
        self.retry_after_s = retry_after_s


class InvalidRequest(MeshError):
    """The client asked for something that cannot be done; the same request will fail again."""

    code: ClassVar[Code] = "invalid_request"
    status = 400


class ContextLengthExceeded(InvalidRequest):
    """Prompt and answer together do not fit the model's context."""

    code: ClassVar[Code] = "context_length_exceeded"


class Unauthorized(MeshError):
    """The API key is missing or not known."""

    code = "unauthorized"
    status = 401


class NotFound(MeshError):
    """The named model or object does not exist."""

    code = "not_found"
    status = 404


class Overloaded(MeshError):
    """The client or the mesh is over a limit; `retry_after_s` says when to come back."""

    code = "overloaded"
    status = 429


class DeadlineExceeded(MeshError):
    """The request's own time ran out."""

    code = "deadline_exceeded"
    status = 504


class Unavailable(MeshError):
    """A part of the mesh that the request needs is not there now."""

    code = "unavailable"
    status = 503


class Cancelled(MeshError):
    """The client went away or asked to stop."""

    code = "cancelled"
    status = 499


ERRORS: dict[str, type[MeshError]] = {
    kind.code: kind
    for kind in (
        MeshError,
        InvalidRequest,
        ContextLengthExceeded,
        Unauthorized,
        NotFound,
        Overloaded,
        DeadlineExceeded,
        Unavailable,
        Cancelled,
    )
}
"""Wire code -> error; an unknown code reads as `MeshError` (our bug)."""
