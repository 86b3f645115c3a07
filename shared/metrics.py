"""What every process counts about itself, in one registry that `/metrics` renders."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

REGISTRY = CollectorRegistry()
"""Not the global default registry: that one adds process and GC collectors at import."""

MAILBOX_DEPTH = Gauge("shoal_mailbox_depth", "Messages waiting", ["role"], registry=REGISTRY)
MESSAGES = Counter("shoal_messages", "Messages handled", ["role"], registry=REGISTRY)
DROPPED = Counter(
    "shoal_messages_dropped",
    "Messages not handled: mailbox full, undecodable, past their deadline, or handling raised",
    ["role", "reason"],
    registry=REGISTRY,
)
TICK_LATENESS = Histogram(
    "shoal_tick_lateness_seconds",
    "How late the actor's own timer fired",
    ["role"],
    buckets=(0.001, 0.005, 0.025, 0.1, 0.25, 1, 5, 30),
    registry=REGISTRY,
)
SLEPT = Counter(
    "shoal_slept", "Times a process lost track of its peers", ["role"], registry=REGISTRY
)
BUS_RECONNECTS = Counter("shoal_bus_reconnects", "NATS reconnects", registry=REGISTRY)
BUS_DROPPED = Counter(
    "shoal_bus_dropped_publishes", "Payloads dropped over the pending limit", registry=REGISTRY
)
BUS_ERRORS = Counter("shoal_bus_errors", "Errors the NATS client reported", registry=REGISTRY)
BUS_REVIVED = Counter(
    "shoal_bus_revived",
    "Connections the watchdog replaced because a task had died",
    registry=REGISTRY,
)


def render() -> bytes:
    """The registry in Prometheus text format."""
    return generate_latest(REGISTRY)
