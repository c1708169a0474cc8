"""Seeded toy checkpoints and the literal reference model, for tests and demos."""
