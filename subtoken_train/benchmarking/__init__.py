"""Timing on this machine: prompts and backbones of a given size, the sides of a comparison, and interleaved rounds."""
