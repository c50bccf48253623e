"""Metrics of the benchmarks, one file each, equal to the reference scorers."""
