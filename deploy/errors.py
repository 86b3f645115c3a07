"""What the person at the terminal can do something about."""


class ClusterError(Exception):
    """One sentence that says what is wrong and, where it is not obvious, what helps."""
