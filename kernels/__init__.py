"""Operations of the forward pass, one per file, each beside its torch reference."""
