"""Backbone families, LoRA, loading, and the attachment of reducers and routers."""

import logging


def _is_news(record: logging.LogRecord) -> bool:
    return "from kernels-community" not in record.getMessage()


# bitsandbytes, where it is installed, misses an optional package for CPUs aloud when peft imports it
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(_is_news)
