"""Qwen2.5-VL; images of 3 x 4 visual tokens and more, and videos."""

from __future__ import annotations

from tests.support.qwen_tiny import qwen_family
from tests.support.tiny import TinyFamily
from tests.support.tiny_qwen import qwen_picture

ORDER = 1
FAMILIES = (TinyFamily("qwen2_5_vl", qwen_family, qwen_picture),)
