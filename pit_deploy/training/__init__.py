"""Training of PIT models: continued, from scratch, adapters, on one process or many (docs/training.md)."""
