"""Launch files of services under test."""

from typing import Any

from shared.config import Launch


def launch_of(role: str, instance: str, settings: dict[str, Any], **fields: Any) -> Launch:
    """What the supervisor would write for the first `role`; buses are made by the test."""
    return Launch(
        role=role,
        name=f"{role}-0",
        instance=instance,
        nats_url="",
        nats_user="",
        nats_password="",
        run_dir="",
        settings=settings,
        **fields,
    )
