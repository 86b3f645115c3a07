"""What the default model says in fp32, as `transformers` computed it from the same weights."""
