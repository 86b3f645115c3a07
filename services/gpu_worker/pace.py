"""How many prompt ids a step takes beside rows that decode, so that no stream waits long. Pure.

A step of n rows that decode costs about as much as n + 10 of them: it reads all weights whatever n
is (8.8, 14.7, 33 and 63 ms at 1, 8, 32 and 64 rows of the default model, 21, 34 and 61 ms in torch
at 1, 8 and 32). What a step with prompt ids takes longer is theirs; an id costs the more the
further it is in its prompt.
"""

IDS_MIN = 4
"""Prompt ids in a step, however slow they are: all prompts come to their end. So few are hardly
dearer than many: the weights are read for the rows that decode anyway, and far into a prompt nearly
all of an id's time is attention.
"""

_WEIGHTS_ROWS = 10  # what reading the weights costs, in rows
_LOOK_AFTER = 32  # steps with prompt ids, then one without shows what decoding alone takes now
_OUTLIER = 2.0  # times as long as expected: such a step was not alone on its CPU


class Average:
    """Seconds per unit in recent steps, each weighed by its units and less the longer it is ago."""

    def __init__(self, keep: float) -> None:
        self._keep = keep
        self._seconds = self._units = 0.0

    @property
    def value(self) -> float:
        return self._seconds / self._units if self._units else 0.0

    def add(self, seconds: float, units: int) -> None:
        self._seconds = self._keep * self._seconds + seconds
        self._units = self._keep * self._units + units


class Pace:
    """`Pace(slowdown)`: a step with prompt ids is to last at most `slowdown` times one without.

    Tell it `took` after each step, ask `num_prompt_ids` before the next.
    """

    def __init__(self, slowdown: float) -> None:
        assert slowdown >= 1
        self._slowdown = slowdown
        self._row = Average(keep=0.7)
        self._prompt_id = Average(keep=0.5)  # it grows along a prompt
        self._since_look = 0

    def num_prompt_ids(self, decoding: int, limit: int) -> int:
        """How many, up to `limit`, beside `decoding` rows. No fewer than `limit` while nobody waits
        for them, or what they cost is not known yet.
        """
        if not decoding or not self._row.value or not self._prompt_id.value:
            return limit
        if self._since_look >= _LOOK_AFTER:
            return 0
        seconds = (self._slowdown - 1) * self.decode_s(decoding)
        return min(limit, max(IDS_MIN, int(seconds / self._prompt_id.value)))

    @property
    def prompt_id_s(self) -> float:
        """What a prompt id takes; 0 = not known yet."""
        return self._prompt_id.value

    def decode_s(self, decoding: int) -> float:
        """What a step of so many rows takes without prompt ids, as far as known."""
        return self._row.value * (decoding + _WEIGHTS_ROWS)

    def took(self, decoding: int, prompt_ids: int, seconds: float) -> None:
        """A step of so many rows and prompt ids lasted `seconds`."""
        expected = self.decode_s(decoding)
        if prompt_ids:
            self._since_look += 1
            self._prompt_id.add(max(0.0, seconds - expected), prompt_ids)
        elif decoding:
            self._since_look = 0
            if expected:
                seconds = min(seconds, _OUTLIER * expected)
            self._row.add(seconds, decoding + _WEIGHTS_ROWS)
