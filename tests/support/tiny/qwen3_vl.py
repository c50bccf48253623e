"""Qwen3-VL; images of 3 x 4 visual tokens and more, and videos."""

from __future__ import annotations

from tests.support.qwen_tiny import qwen3_family
from tests.support.tiny import TinyFamily
from tests.support.tiny_qwen import qwen_picture

ORDER = 11
FAMILIES = (TinyFamily("qwen3_vl", qwen3_family, qwen_picture),)
