"""What can go wrong with one leg inside a step, and what its client is told."""

from typing import Literal

from shared.errors import InvalidRequest, MeshError, Unavailable

Fault = Literal["", "nan_logits", "no_id_left", "out_of_memory", "raised"]


def error_of(fault: Fault) -> MeshError:
    """The error that a leg fails with. What the client asked for is its own fault; anything else
    may go better on another worker.
    """
    match fault:
        case "no_id_left":
            return InvalidRequest(
                "allowed_token_ids, bad_words, stop_token_ids and min_tokens leave no id to choose",
                param="allowed_token_ids",
            )
        case "nan_logits":
            return MeshError("the model's numbers went wrong on this request (NaN or infinity)")
        case "out_of_memory":
            return Unavailable("this worker has not enough memory for the request")
        case _:
            return MeshError("the model failed on this request")
