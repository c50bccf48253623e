"""What is known of the prompt that was compressed last."""

from __future__ import annotations

from dataclasses import dataclass

from subtoken_train.cache.cache import PackedCache
from subtoken_train.types import Batch, Plan


@dataclass
class LastPrompt:
    """The last prompt that was compressed.

    Attributes:
        batch: the prompts; their pixels are let go.
        plan: what the cache keeps of them.
        cache: what follows them is in it too.
        prefill_seconds: of the prompt's pass; 0 where the last call went on from the cache.
        decode_seconds: of everything else.
        beams: running beams of each prompt in the cache.
    """

    batch: Batch
    plan: Plan
    cache: PackedCache
    prefill_seconds: float
    decode_seconds: float = 0.0
    beams: int = 1
