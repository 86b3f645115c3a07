"""What every service may know. Torch-free; imports nothing else of ours."""
