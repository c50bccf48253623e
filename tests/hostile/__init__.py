"""Hostile inputs, drawn by seed: generators by class, one runner for the test and for ``benchmarks/hostile.py``."""
