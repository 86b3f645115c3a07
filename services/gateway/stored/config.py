"""Settings of stored requests: the `[gateway.stored]` table of cluster.toml."""

from typing import Annotated

from msgspec import Meta, Struct

from shared.config import AboveZero, Count


class StoredConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every limit, with its unit and why it has that value. Those of the streams are the cluster's:
    the gateway that started last has set them.
    """

    age_s: AboveZero = 3600.0  # a log and its answer are kept for so long
    bytes_max: Count = 256 << 20  # of all logs together; a quarter of what the server may store
    # Of one log: a burst of 4,096, then ten minutes of four a second, and some for its end.
    events_max: Annotated[int, Meta(ge=64)] = 8192
    jobs_max: Count = 10000  # waiting and running; 503 beyond
    jobs_bytes_max: Count = 8 << 20  # a job is a name
    body_bytes_max: Count = 1 << 20  # it lies in the log; 413 beyond

    running_max: Count = 64  # run by one gateway at a time; the rest wait in the queue
    ack_wait_s: AboveZero = 5.0  # silence of a gateway before another adopts what it ran
    working_s: AboveZero = 1.5  # a running one says so this often: three times before it is silent
    deliveries_max: Count = 1000  # of one job; adoptions without progress end it far earlier
    pull_s: AboveZero = 2.0  # a question for the next job waits so long at the server

    buffer_ids_max: Count = 4096  # not logged yet; beyond, or after `buffer_s`, the session is
    buffer_s: AboveZero = 5.0  # dropped and begins again from the log once that can be written
    append_timeout_s: AboveZero = 2.0  # a restarted server is back sooner
    poll_s: AboveZero = 1.0  # a reader that hears nothing looks at the log this often
