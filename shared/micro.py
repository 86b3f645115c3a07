"""The NATS micro protocol (ADR-32 of the NATS project): `$SRV.PING|INFO|STATS` answered as JSON.

So `nats micro ls` and any other tool of the NATS world sees the services of a mesh. Pure.
"""

from typing import Any

import msgspec

from shared.config import Launch

VERSION = "0.1.0"
VERBS = ("PING", "INFO", "STATS")


class Micro:
    """Answers of one instance. `metadata` values must be strings (the protocol says so)."""

    def __init__(self, launch: Launch, subjects: list[str], metadata: dict[str, str]) -> None:
        self.name = f"shoal-{launch.role}".replace("_", "-")
        self.instance = launch.instance
        self._subjects = subjects
        self._metadata = metadata

    def subjects(self) -> list[str]:
        """Where questions arrive: all services, this name, this instance."""
        return [
            f"$SRV.{verb}{suffix}"
            for verb in VERBS
            for suffix in ("", f".{self.name}", f".{self.name}.{self.instance}")
        ]

    def answer(self, subject: str, started: str, stats: dict[str, int]) -> bytes:
        """The JSON answer to a question that arrived on `subject`; all `stats` are its `data`,
        `handled` and `errors` of them what the protocol has a place for.
        """
        verb = subject.split(".")[1]
        body: dict[str, Any] = {
            "type": f"io.nats.micro.v1.{verb.lower()}_response",
            "name": self.name,
            "id": self.instance,
            "version": VERSION,
            "metadata": self._metadata,
        }
        if verb == "INFO":
            body["description"] = f"Shoal {self.name.removeprefix('shoal-')}"
            body["endpoints"] = [
                {"name": "mailbox", "subject": subject, "queue_group": "", "metadata": {}}
                for subject in self._subjects
            ]
        if verb == "STATS":
            body["started"] = started
            body["endpoints"] = [
                {
                    "name": "mailbox",
                    "subject": self._subjects[0],
                    "queue_group": "",
                    "num_requests": stats["handled"],
                    "num_errors": stats["errors"],
                    "last_error": "",
                    "processing_time": 0,  # mailboxes are not timed per message
                    "average_processing_time": 0,
                    "data": stats,
                }
            ]
        return msgspec.json.encode(body)
