"""Subjects on the bus. Internal ones live in their own NATS account (ADR 2)."""

PUBLIC = "shoal.v1"
INTERNAL = "mesh.v1"
PRIVATE_INBOX = "_MESH_INBOX"  # answers among ourselves; `_INBOX.>` is what outsiders hear (ADR 2)

GENERATE = f"{PUBLIC}.generate"
REPLAY = f"{PUBLIC}.replay"
JOBS = f"{PUBLIC}.jobs"

DIED = f"{INTERNAL}.died"
OWNED = f"{INTERNAL}.owned"  # which gateway has the frames of a request?


def inbox(instance: str) -> str:
    """The mailbox of one instance; new at every start, so a late message finds nobody."""
    return f"{INTERNAL}.in.{instance}"


def everyone(role: str) -> str:
    """Every instance of a role."""
    return f"{INTERNAL}.all.{role}"


def beat(role: str, instance: str = "*") -> str:
    """Heartbeats of one instance, or of all of a role."""
    return f"{INTERNAL}.beat.{role}.{instance}"


def beacon(pool: str) -> str:
    """Where the leader of a pool shows itself."""
    return f"{INTERNAL}.beacon.{pool}"


def stored(request_id: str = "*") -> str:
    """The log of one stored request, or of all: what is published there goes into a stream."""
    return f"{INTERNAL}.stored.{request_id}"


def logged(request_id: str) -> str:
    """Where the server says what it has just stored in the log of a request."""
    return f"{INTERNAL}.logged.{request_id}"


def job(request_id: str = "*") -> str:
    """The place of a stored request in the work queue."""
    return f"{INTERNAL}.jobs.{request_id}"
