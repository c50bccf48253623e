"""Packed key-value storage: only what a plan keeps takes bytes."""
