"""A whole step of a decoder as one compiled call, for CPUs with AVX-512 or AMX."""
