"""How near each precision is to fp32: a tool, and tests of its parts."""
