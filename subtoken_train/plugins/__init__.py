"""The model inside other evaluation harnesses; no harness is imported unless its own module here is."""
