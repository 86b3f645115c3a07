"""Monotonic time as a value, so that pure cores can be driven by tests."""

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds from an arbitrary origin; never compared between processes."""

monotonic: Clock = time.monotonic
