"""What a gateway counts. Names are vLLM's where they mean the same, `shoal:` where they do not.

Counters and histograms are one gateway's (label `gateway`): gateways share a listening socket, so
any of them may answer a scrape. Gauges from beats are the whole mesh's and have no such label.
"""

from prometheus_client import Counter, Gauge, Histogram

from services.gateway.events import Delta, SessionEnd, SessionEvent
from services.gateway.view import MeshView
from shared.clock import Clock
from shared.errors import Cancelled
from shared.metrics import REGISTRY

OWN = ["model_name", "gateway"]
MESH = ["model_name"]
WORKER = ["model_name", "worker"]


def _seconds(bounds: str) -> tuple[float, ...]:
    return tuple(float(bound) for bound in bounds.split())


TTFT_S = _seconds(".001 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10 20 40 80 160 640")
ITL_S = _seconds(".001 .002 .005 .01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 5 7.5 10 20 40")
E2E_S = _seconds(".3 .5 .8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920")
TOKENS = tuple(step * 10**power for power in range(6) for step in (1, 2, 5))

RUNNING = Gauge("vllm:num_requests_running", "Legs in a batch", MESH, registry=REGISTRY)
WAITING = Gauge("vllm:num_requests_waiting", "Legs that wait", MESH, registry=REGISTRY)
KV_USAGE = Gauge("vllm:kv_cache_usage_perc", "KV blocks in use, 1 = all", MESH, registry=REGISTRY)
BLOCKS_TOTAL = Gauge("shoal:kv_blocks_total", "KV blocks of all workers", MESH, registry=REGISTRY)
BLOCKS_FREE = Gauge("shoal:kv_blocks_free", "Free or evictable blocks", MESH, registry=REGISTRY)
WORKERS = Gauge("shoal:workers", "Workers that beat", MESH, registry=REGISTRY)
SESSIONS = Gauge("shoal:sessions", "Open sessions", OWN, registry=REGISTRY)
LEGS = Gauge("shoal:legs", "Open legs", OWN, registry=REGISTRY)
REDRIVES = Counter(
    "shoal:redrives", "Submits planned again, by cause", [*OWN, "cause"], registry=REGISTRY
)

PROMPT_TOKENS = Counter("vllm:prompt_tokens", "Prompt tokens", OWN, registry=REGISTRY)
CACHED_TOKENS = Counter(
    "vllm:prompt_tokens_cached", "Prompt tokens found in a cache", OWN, registry=REGISTRY
)
GENERATION_TOKENS = Counter("vllm:generation_tokens", "Tokens delivered", OWN, registry=REGISTRY)
SUCCESS = Counter(
    "vllm:request_success",
    "Choices ended, or requests failed",
    [*OWN, "finished_reason"],
    registry=REGISTRY,
)
TTFT = Histogram(
    "vllm:time_to_first_token_seconds", "Arrival to first token", OWN,
    buckets=TTFT_S, registry=REGISTRY,
)  # fmt: skip
ITL = Histogram(
    "vllm:inter_token_latency_seconds", "Between two tokens of a choice", OWN,
    buckets=ITL_S, registry=REGISTRY,
)  # fmt: skip
E2E = Histogram(
    "vllm:e2e_request_latency_seconds", "Arrival to end", OWN, buckets=E2E_S, registry=REGISTRY
)
PROMPT_SIZE = Histogram(
    "vllm:request_prompt_tokens", "Prompt tokens of a request", OWN,
    buckets=TOKENS, registry=REGISTRY,
)  # fmt: skip
OUTPUT_SIZE = Histogram(
    "vllm:request_generation_tokens", "Tokens delivered to a request", OWN,
    buckets=TOKENS, registry=REGISTRY,
)  # fmt: skip
RESPONSES = Counter(
    "shoal:http_responses", "HTTP answers", ["gateway", "status"], registry=REGISTRY
)
CUT = Counter(
    "shoal:clients_cut", "Readers too slow, or gone", ["gateway", "why"], registry=REGISTRY
)
EVENTS = Counter(
    "shoal:process_events",
    "What this process counted, as `$SRV.STATS` shows it",
    ["gateway", "event"],
    registry=REGISTRY,
)
ENGINE_SECONDS = Counter(
    "shoal:engine_phase_seconds",
    "Where the time of a worker's engine went, since its start",
    ["worker", "phase"],
    registry=REGISTRY,
)
PREFIX_QUERIES = Counter(
    "vllm:prefix_cache_queries", "Tokens looked up in L1", WORKER, registry=REGISTRY
)
PREFIX_HITS = Counter("vllm:prefix_cache_hits", "Tokens found in L1", WORKER, registry=REGISTRY)
TIER_HITS = Counter(
    "shoal:prefix_cache_hits",
    "Tokens that a tier had and no worker computed again",
    [*WORKER, "tier"],
    registry=REGISTRY,
)
PREEMPTIONS = Counter(
    "vllm:num_preemptions", "Legs that gave up their blocks for others", WORKER, registry=REGISTRY
)


class Told:
    """A counter of which others tell the totals, by labels; what they tell no longer is gone."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._told: dict[tuple[str, ...], float] = {}

    def show(self, totals: dict[tuple[str, ...], float]) -> None:
        for labels, total in totals.items():
            more = total - self._told.get(labels, 0.0)
            self._counter.labels(*labels).inc(max(0.0, more))
        for labels in self._told.keys() - totals.keys():
            self._counter.remove(*labels)
        self._told = totals


class Meter:
    """The metrics of one gateway, with its labels bound once."""

    def __init__(self, model: str, gateway: str) -> None:
        self._own = (model, gateway)
        self._mesh = (model,)
        self.gateway = gateway
        self.prompt_tokens = PROMPT_TOKENS.labels(*self._own)
        self.cached_tokens = CACHED_TOKENS.labels(*self._own)
        self.generated = 0  # tokens not yet in their counter: an increment costs more than a token
        self.ttft = TTFT.labels(*self._own)
        self.itl = ITL.labels(*self._own)
        self.e2e = E2E.labels(*self._own)
        self.prompt_size = PROMPT_SIZE.labels(*self._own)
        self.output_size = OUTPUT_SIZE.labels(*self._own)
        for reason in ("stop", "length", "abort", "error"):  # a rate needs the zero before the one
            SUCCESS.labels(*self._own, reason)
        self._redrives, self._events = Told(REDRIVES), Told(EVENTS)
        self._engine_seconds, self._preemptions = Told(ENGINE_SECONDS), Told(PREEMPTIONS)
        self._queries, self._hits = Told(PREFIX_QUERIES), Told(PREFIX_HITS)
        self._tier_hits = Told(TIER_HITS)

    def finished(self, reason: str) -> None:
        SUCCESS.labels(*self._own, reason).inc()

    def cut(self, why: str) -> None:
        CUT.labels(self.gateway, why).inc()

    def responded(self, status: int) -> None:
        RESPONSES.labels(self.gateway, str(status)).inc()

    def mesh(self, view: MeshView) -> None:
        """Set the mesh's gauges."""
        free, total = view.blocks_free, view.blocks_total
        RUNNING.labels(*self._mesh).set(view.running)
        WAITING.labels(*self._mesh).set(view.waiting)
        KV_USAGE.labels(*self._mesh).set(1 - free / total if total else 0)
        BLOCKS_FREE.labels(*self._mesh).set(free)
        BLOCKS_TOTAL.labels(*self._mesh).set(total)
        WORKERS.labels(*self._mesh).set(view.workers)

    def sessions(self, sessions: int, legs: int, redrives: dict[str, int]) -> None:
        """Bring this gateway's gauges and slow counters up to date."""
        GENERATION_TOKENS.labels(*self._own).inc(self.generated)
        self.generated = 0
        SESSIONS.labels(*self._own).set(sessions)
        LEGS.labels(*self._own).set(legs)
        self._redrives.show({(*self._own, cause): count for cause, count in redrives.items()})

    def process(self, stats: dict[str, int]) -> None:
        """Bring what the actor counts up to date."""
        self._events.show({(self.gateway, event): count for event, count in stats.items()})

    def engines(
        self, seconds: dict[str, dict[str, float]], counts: dict[str, dict[str, int]]
    ) -> None:
        """Bring each worker's seconds by phase and its counts up to date; one that is gone is shown
        no longer.
        """
        self._engine_seconds.show(
            {(worker, phase): s for worker, spent in seconds.items() for phase, s in spent.items()}
        )

        def totals(name: str) -> dict[tuple[str, ...], float]:
            model = self._mesh[0]
            return {(model, worker): count.get(name, 0) for worker, count in counts.items()}

        self._queries.show(totals("queried_tokens"))
        self._hits.show(totals("l1_hit_tokens"))
        self._preemptions.show(totals("preemptions"))
        self._tier_hits.show(
            {
                (*labels, tier): total
                for tier in ("l1", "l2")
                for labels, total in totals(f"{tier}_hit_tokens").items()
            }
        )


class Measure:
    """What one session adds to the metrics, event by event."""

    def __init__(self, meter: Meter, clock: Clock) -> None:
        self.ended = False
        self._meter = meter
        self._clock = clock
        self._opened = clock()
        self._last: dict[int, float] = {}  # when each choice last got an id

    def take(self, event: SessionEvent) -> None:
        if isinstance(event, Delta):
            self._count(event, self._clock())
        elif isinstance(event, SessionEnd):
            self._count_end(event, self._clock())

    def _count(self, delta: Delta, now: float) -> None:
        count = len(delta.ids)
        if count:
            self._meter.generated += count
            last = self._last.get(delta.choice)
            if last is not None:
                for _ in range(count):
                    self._meter.itl.observe((now - last) / count)
            elif not self._last:
                self._meter.ttft.observe(now - self._opened)
            self._last[delta.choice] = now
        if delta.finish_reason:
            self._meter.finished(delta.finish_reason)

    def _count_end(self, end: SessionEnd, now: float) -> None:
        if self.ended:
            return
        self.ended = True
        self._meter.e2e.observe(now - self._opened)
        self._meter.prompt_tokens.inc(end.prompt_tokens)
        self._meter.cached_tokens.inc(end.cached_tokens)
        self._meter.prompt_size.observe(end.prompt_tokens)
        self._meter.output_size.observe(end.completion_tokens)
        if end.error is not None:
            self._meter.finished("abort" if isinstance(end.error, Cancelled) else "error")
