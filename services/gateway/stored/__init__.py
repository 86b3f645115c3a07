"""Stored requests: a job, a log and its readers (ADR 5)."""
