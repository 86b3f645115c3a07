"""The edge: OpenAI over HTTP and the bus; owner of every session."""
