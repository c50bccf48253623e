"""Qwen2-VL; images of 3 x 4 visual tokens and more, and videos."""

from __future__ import annotations

from tests.support.qwen_tiny import qwen2_family
from tests.support.tiny import TinyFamily
from tests.support.tiny_qwen import qwen_picture

ORDER = 10
FAMILIES = (TinyFamily("qwen2_vl", qwen2_family, qwen_picture),)
