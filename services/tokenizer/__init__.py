"""Text and conversations to ids: a function."""
