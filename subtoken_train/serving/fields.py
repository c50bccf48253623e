"""The fields that OpenAI's clients, and those of vLLM and SGLang, send, and what becomes of each.

One rule in this order: null is as if left out; what changes nothing is ignored; what is obeyed is read; the rest is
refused by name. The page of the server is made from these tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from subtoken_train.errors import COLD
from subtoken_train.typed import shown

OBEYED = {
    "model": "the one that is served (404 otherwise)",
    "messages": "system, developer, user, assistant; texts, and pictures as data URLs",
    "prompt": "`/v1/completions`: a text, or a list of one, which goes on without a chat template",
    "max_tokens, max_completion_tokens": "at least 1; more than `--max-new-tokens` or the model's positions is capped",
    "temperature": "0 to 2; up to 0.00001, or left out: greedy",
    "top_p": "above 0, to 1",
    "seed": "of the draws",
    "stop": "4 texts of at most 200 characters",
    "stream, stream_options": "`include_usage`",
    "chat_template_kwargs": "what the tokenizer's chat template reads, as `enable_thinking`; 400 for another name",
    "continue_final_message, add_generation_prompt": "400 where they deny that a last message of the assistant goes on",
    "eviction, eviction_keep, context": "see below",
}
"""Fields that are read, and how."""
IGNORED = (
    "user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "store", "service_tier",
    "reasoning_effort", "verbosity", "prediction", "parallel_tool_calls", "priority", "request_id",
    "include_reasoning", "separate_reasoning",
)  # fmt: skip
"""Names that ask for no other answer here, whatever they say."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "typical_p": (1,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "use_beam_search": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "echo": (False,),
    "suffix": ("",),
    "return_token_ids": (False,),
    "cache_salt": ("",),
}
"""Fields that nothing here obeys: values without effect."""
OF_DRAWS = ("temperature", "top_k", "min_p", "typical_p")
"""Without effect on a greedy answer, whatever they say."""
OF_MESSAGES: dict[str, tuple[Any, ...]] = {"tool_calls": ([],), "function_call": (), "cache_control": ()}
"""Fields of a message that would change an answer; all others but role and content are ignored."""
OF_STREAMS: dict[str, tuple[Any, ...]] = {"continuous_usage_stats": (False,)}


def check_harmless(content: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]], place: str = "") -> None:
    """Raise ``ValueError`` for the first field that would change the answer, and that nothing obeys."""
    for name, value in content.items():
        if name in neutral and value is not None and not any(_same(value, each) for each in neutral[name]):
            raise ValueError(f"{place}{name} {shown(value)} is not served here; leave it out")


def obeyed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request that are left to read; another one that would change the answer is refused."""
    asked = {name: value for name, value in content.items() if value is not None and name not in IGNORED}
    heat = asked.get("temperature", 0)
    if type(heat) in (int, float) and 0 <= heat <= COLD:
        asked = {name: value for name, value in asked.items() if name not in OF_DRAWS}
    check_harmless(asked, NEUTRAL)
    return {name: value for name, value in asked.items() if name not in NEUTRAL}


def _same(value: Any, other: Any) -> bool:
    """Return whether two values are one, of which neither is true or false unless both are."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)
