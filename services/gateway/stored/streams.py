"""The two streams of stored requests as JetStream is asked for them. Pure."""

from services.gateway.stored.config import StoredConfig
from shared.jetstream import NANO, ConsumerConfig, StreamConfig
from shared.subjects import job, logged, stored

LOGS = "stored"
JOBS = "jobs"
CONSUMER = "gateways"


def log_stream(config: StoredConfig) -> StreamConfig:
    """One subject per request. Full means refused, never that an older event goes."""
    return StreamConfig(
        name=LOGS,
        subjects=[stored()],
        retention="limits",
        max_age=int(config.age_s * NANO),
        max_bytes=config.bytes_max,
        max_msgs_per_subject=config.events_max,
        discard_new_per_subject=True,
        allow_direct=True,
        republish={"src": stored(), "dest": logged("{{wildcard(1)}}")},
    )


def job_stream(config: StoredConfig) -> StreamConfig:
    """A job stays until it is done; an append that expects none makes sure that it is the only one
    of its request.
    """
    return StreamConfig(
        name=JOBS,
        subjects=[job()],
        retention="workqueue",
        max_age=int(config.age_s * NANO),
        max_bytes=config.jobs_bytes_max,
        max_msgs=config.jobs_max,
    )


def job_consumer(config: StoredConfig) -> ConsumerConfig:
    """Shared by all gateways; as many jobs as there may be can run."""
    return ConsumerConfig(
        durable_name=CONSUMER,
        ack_wait=int(config.ack_wait_s * NANO),
        max_deliver=config.deliveries_max,
        max_ack_pending=config.jobs_max,
    )
