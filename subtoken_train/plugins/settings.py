"""Generation settings of a harness's request, read for greedy decoding."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""What harnesses call the cap on an answer; the first one given counts, as in lm-evaluation-harness."""
OF_SAMPLERS = ("top_p", "top_k", "temperature", "do_sample")
"""Without effect where nothing is sampled."""


@dataclass(frozen=True)
class GreedySettings:
    """Cap on an answer, in tokens, and the texts that end it (they are cut off)."""

    max_new_tokens: int
    stop: tuple[str, ...]


def greedy_settings(given: Mapping[str, Any], default_length: int, ignored: Collection[str] = ()) -> GreedySettings:
    """Read the settings of one request.

    Args:
        given: the harness's generation keyword arguments.
        default_length: tokens of an answer where they name none.
        ignored: further settings that mean nothing here.

    Raises:
        ValueError: sampling, beams, or a setting that greedy decoding does not know.
    """
    temperature = float(given.get("temperature") or 0)
    samples = given.get("do_sample")
    if samples or (samples is None and temperature > 0):
        raise ValueError(
            f"do_sample={samples}, temperature={temperature:g}: answers are greedy; ask for do_sample=false (in "
            "lm-eval: --gen_kwargs do_sample=false)"
        )
    if int(given.get("num_beams") or 1) > 1:
        raise ValueError(f"num_beams={given['num_beams']}: answers are greedy, leave beams out")
    for name, value in given.items():
        if name not in (*LENGTHS, *OF_SAMPLERS, *ignored, "until", "num_beams") and value is not None:
            raise ValueError(f"generation setting {name}={value!r} does not go with greedy decoding; leave it out")
    lengths = [int(given[name]) for name in LENGTHS if given.get(name) is not None]
    length = lengths[0] if lengths else default_length
    if length < 1:
        raise ValueError(f"an answer of {length} tokens was asked for; it must be at least 1")
    until = given.get("until") or ()
    texts = [until] if isinstance(until, str) else list(until)
    return GreedySettings(length, tuple(text for text in texts if text))
