"""Answering questions under compression, scoring, intervals, and comparison tables."""
