"""The L2 cache of KV blocks in Redis."""
