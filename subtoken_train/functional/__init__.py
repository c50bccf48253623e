"""Tensor mathematics, as pure functions: value groups and their masks, gather, statistics, losses, hashing."""
