"""An eviction of your own in ten lines: the entries whose keys are longest stay.

python examples/an_eviction_of_your_own.py
"""

from dataclasses import dataclass
from typing import ClassVar

from subtoken_train import SubTokenModel
from subtoken_train.evictions.base import Eviction
from subtoken_train.resources import resource
from subtoken_train.view.scores import Scores
from subtoken_train.view.view import Need, View


@dataclass(frozen=True)
class LongKeys(Eviction):
    """Keep the entries whose keys are longest, in each head."""

    name: ClassVar[str] = "long_keys"
    needs: ClassVar[frozenset[Need]] = frozenset({"key_norms"})

    def score(self, view: View) -> Scores:
        """Return scores of all entries, [B, heads, N]; the highest stay. No entry is protected."""
        return Scores(view.key_norms(), view.entries_BN.new_zeros(view.entries_BN.shape))


text = resource("data/samples/long.txt").read_text(encoding="utf-8")
model = SubTokenModel.from_pretrained(resource("checkpoints/tiny-llama"), eviction=LongKeys(), eviction_keep=0.5)
print(model.chat(text, raw=True, max_new_tokens=16))
print(model.cache_report())
