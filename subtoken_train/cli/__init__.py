"""Command line: one file per command, listed and dispatched by ``main``."""
