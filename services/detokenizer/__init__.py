"""Ids to text, safe for UTF-8 and stop strings."""
