"""StreamingLLM (Xiao et al., 2024): the first few entries and the most recent ones, whatever they hold.

Source: sections 3.1-3.2 of "Efficient Streaming Language Models with Attention Sinks"; the released code keeps 4 sinks.
It never looks at attention. Keys keep their original positions unless ``rerotate`` is set, which is what the released
code does. While tokens are decoded the window moves on (``eviction_every``). The sinks are the first of the whole
prompt, the recent entries the last of what competes. KVCache-Factory's class of that name fixes the window: here
``sinks`` = capacity - window.

Legend: B batch, N cached rows of the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from subtoken_train.evictions.base import Eviction
from subtoken_train.view.method import setting
from subtoken_train.view.scores import Scores
from subtoken_train.view.view import Online, View


@dataclass(frozen=True)
class StreamingLLM(Eviction):
    """Attention sinks and a recent window, one set for all heads.

    Attributes:
        sinks: first entries that always stay, inside the budget; a budget no larger leaves only sinks, the latest.
    """

    name: ClassVar[str] = "streaming_llm"
    online: ClassVar[Online] = Online(rows=0)
    heads_share: ClassVar[bool] = True

    sinks: int = setting(4)

    def score(self, view: View) -> Scores:
        """Later entries score higher, [B, 1, N]; the sinks are protected."""
        place_BN = view.entries_BN.cumsum(-1)
        return Scores(place_BN[:, None].float(), view.entries_BN & (place_BN <= self.sinks))
