"""What models need besides layers: generation and checkpoints."""
