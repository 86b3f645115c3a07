"""Which leg runs where, and when."""
