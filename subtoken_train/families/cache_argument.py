"""The name under which transformers' models, layers and masks take a cache: it changed in 5.24."""

from __future__ import annotations

import inspect

from transformers.masking_utils import create_causal_mask

CACHE = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"
"""``cache`` from transformers 5.24 on, where the old name costs a warning a layer and step."""
