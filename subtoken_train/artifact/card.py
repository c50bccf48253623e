"""The model card that travels with an adapter folder."""

from __future__ import annotations

from typing import Any

from subtoken_train.functional.ledger import KVBudget

_CARD = """---
library_name: peft
base_model: {base}
tags: [subtoken_train, kv-cache-compression, lora]
---

# {title}

q/v LoRA{routers} for `{base}`, trained with subtoken_train under the token reducer it is meant to run with.

| setting | value |
|---|---|
| token reducer | {reducer} |
| routing | {routing} |
| LoRA | rank {rank}, alpha {alpha}, dropout {dropout} |
| nominal KV of the routed region | {fraction:.4%} |
| training | {training} |

`PeftModel.from_pretrained(backbone, this_folder)` loads the LoRA alone. Reducer and routers need subtoken_train:

    subtoken-train evaluate --adapter this_folder --data questions.json

The adapter falls under the licence of its backbone.
"""


def model_card(record: dict[str, Any]) -> str:
    """Markdown of the card from the contents of ``subtoken_config.json``."""
    routing, reducer, lora = record["routing"], record["reducer"], record["lora"]
    groups = routing or {"num_groups": 1, "kept_groups": 1}
    budget = KVBudget(reducer["keep_ratio"], groups["num_groups"], groups["kept_groups"])
    words = "none" if routing is None else f"{routing['selector']}, S={groups['num_groups']}, K={groups['kept_groups']}"
    return _CARD.format(
        base=record["backbone"]["path"],
        title=record["training"].get("name", "subtoken adapter"),
        routers="" if routing is None else " and value-group routers",
        reducer=f"{reducer['name']}, keep ratio {reducer['keep_ratio']}",
        routing=words,
        rank=lora["rank"],
        alpha=lora["alpha"],
        dropout=lora["dropout"],
        fraction=budget.total_kv_fraction,
        training=", ".join(f"{key} {value}" for key, value in record["training"].items()) or "not recorded",
    )
