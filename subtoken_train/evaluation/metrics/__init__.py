"""Metrics that several benchmarks share, equal to the reference scorers; others stand beside their task."""
