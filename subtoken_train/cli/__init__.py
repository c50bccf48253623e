"""Command line: one file per command, listed in ``registry``, dispatched and guarded by ``main``."""
