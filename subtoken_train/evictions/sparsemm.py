"""SparseMM (Wang et al., 2025): heads that look at what an answer tells of a picture keep more entries.

Source: "SparseMM: Head Sparsity Emerges from Visual Concept Responses in MLLMs" (2506.05344) and its released code
(CR400AF-A/SparseMM @f52655b). Windows, an equal ``floor`` of what they leave (its ``ratio``), and the rest by the
heads' scores: HeadKV's division (``headkv.py``) by scores of visual heads; ``subtoken-train calibrate sparsemm`` finds
them once for a backbone. A head's entries are chosen by the last 32 rows, their mean over a group and over 5
neighbours. As released it is of the whole prompt, which is ``scope: all`` here.

What differs from the release: its heads are rounded one by one, and what a head has no entries for is lost; here the
budget is exact. Its scores were found on pages of words and their boxes, here on digit scenes (``visual_heads.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from subtoken_train.evictions.headkv import HeadKV
from subtoken_train.evictions.observers import Pooling, kernel_setting


@dataclass(frozen=True)
class SparseMM(HeadKV):
    """HeadKV's budgets by scores of visual heads; see ``HeadKV`` for the settings."""

    name: ClassVar[str] = "sparsemm"

    kernel: int = kernel_setting(5)
    pooling: Pooling = "avg"
