"""Numbers as a table that is markdown and reads well as text, too."""

from collections.abc import Iterable, Sequence


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    padded = ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines]
    return "\n".join([padded[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *padded[1:]])
