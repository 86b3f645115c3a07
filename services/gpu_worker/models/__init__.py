"""Model families, one readable file each."""
