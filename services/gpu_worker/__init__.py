"""The engine and the process that speaks for it."""
