"""L2 as a worker uses it: blocks of its prefix cache in Redis, by way of a kv_tier."""
