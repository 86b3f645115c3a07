"""The registry that a gateway renders at `/metrics`, and what every actor observes in it.

Plain counts are not here: an actor holds them as numbers (`Actor.stats`).
"""

from prometheus_client import CollectorRegistry, Histogram, generate_latest

REGISTRY = CollectorRegistry()
"""Not the global default registry: that one adds process and GC collectors at import."""

TICK_LATENESS = Histogram(
    "shoal:tick_lateness_seconds",
    "How late the timer of an actor fired",
    ["process"],
    buckets=(0.001, 0.005, 0.025, 0.1, 0.25, 1, 5, 30),
    registry=REGISTRY,
)


def render() -> bytes:
    """The registry in Prometheus text format."""
    return generate_latest(REGISTRY)
