"""The evictions that stand beside the routed arms, with their settings on the embedded models' short contexts.

Published defaults are for thousands of tokens; 64 visual tokens, of which 10 or 5 stay, have no room for the sinks and
windows that suit these. Settings were chosen on dev or on other scenes, never on what a final table asks.
"""

from __future__ import annotations

from typing import Any

ALPHAS = "checkpoints/calibrations/tiny-llama_duo_attention.json"
PEERS: dict[str, str] = {
    "streaming_llm": "streaming_llm",
    "h2o": "h2o",
    "snapkv": "snapkv",
    "pyramidkv": "pyramidkv",
    "knorm": "knorm",
    "random": "random",
    "aircache": "aircache",
    "vl_cache": "vl_cache",
    "tgv_kv": "tgv_kv",
    "kvcompose": "kvcompose",
    "kvzip": "kvzip",
    "expected_attention": "expected_attention",
    "compactor": "compactor",
    "keydiff": "keydiff",
    "tova": "tova",
    "lagkv": "lagkv",
    "elastic": "elastic",
    "prefixkv": "prefixkv",
    "duo_attention": "duo_attention",
    "q_filter": "q_filter",
    "quest_steps": "quest_steps",
    "ada-snapkv": "ada(snapkv)",
    "ada-expected_attention": "ada(expected_attention)",
    "ada-compactor": "ada(compactor)",
    "ada-keydiff": "ada(keydiff)",
    "critical-snapkv": "critical(snapkv)",
    "ada-critical-expected_attention": "ada(critical(expected_attention))",
    "chunk-snapkv": "chunk(snapkv)",
}
"""Name in files and tables -> notation. ``per_layer`` is left out: its shares are somebody's choice."""
_SCENES: dict[str, dict[str, Any]] = {
    "streaming_llm": {"sinks": 1},
    "snapkv": {"snapkv.window": 8},
    "pyramidkv": {"window": 8},
    "chunk": {"length": 2},
    "compactor": {"compactor.sinks": 0, "compactor.last": 0},
    "expected_attention": {"expected_attention.sinks": 1, "expected_attention.epsilon": 0.01},
    "lagkv": {"sinks": 0, "lag": 4},
    "duo_attention": {"sinks": 1, "recent": 3},
}
_RECALL: dict[str, dict[str, Any]] = {
    "snapkv": {"snapkv.window": 16},
    "pyramidkv": {"window": 16},
    "chunk": {"length": 4},
    "kvzip": {"chunk": 256},
    "lagkv": {"lag": 16},
    "duo_attention": {"calibration": ALPHAS},
}
_ADA_EPSILON = {"expected_attention.epsilon": 0.01}
"""kvpress's for Ada around ExpectedAttention."""


def peer_settings(task: str, name: str) -> dict[str, Any]:
    """The settings of a peer on a task (``scenes`` or ``recall``); those of every method in it."""
    own = {"scenes": _SCENES, "recall": _RECALL}[task]
    parts = PEERS[name].replace(")", "").split("(")
    found = _ADA_EPSILON if parts[0] == "ada" and parts[-1] == "expected_attention" else {}
    return {**found, **{key: value for part in parts for key, value in own.get(part, {}).items()}}
