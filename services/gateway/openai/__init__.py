"""OpenAI's wire format: checked requests in, chunks and bodies out. Pure."""
