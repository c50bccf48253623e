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

q/v LoRA{routers} for `{base}`, trained with subtoken_train under the token reducer it is meant to run with.{stages}

| setting | value |
|---|---|
| token reducer | {reducer} |
| routing | {routing} |
| LoRA on q and v | {lora} |
{output_row}| nominal KV of the routed region | {fraction:.4%} |
| training | {training} |

`PeftModel.from_pretrained(backbone, this_folder)` loads the LoRA alone{second}.
Reducer and routers need subtoken_train:

    subtoken-train evaluate --adapter this_folder --data questions.json

The adapter falls under the licence of its backbone.
"""


_STAGES = """

Trained in two stages: first the q/v LoRA, token-only ({stage1}); then, with it frozen, the {parts}."""

_SECOND = """; for the one on `o_proj` as well, follow it by
`load_adapter(this_folder + "/output", "output")` and `base_model.set_adapter(["default", "output"])`"""


def model_card(record: dict[str, Any]) -> str:
    """Markdown of the card from the contents of ``subtoken_config.json``."""
    routing, reducer, stage2 = record["routing"], record["reducer"], record["stage2"]
    groups = routing or {"num_groups": 1, "kept_groups": 1}
    budget = KVBudget(reducer["keep_ratio"], groups["num_groups"], groups["kept_groups"])
    words = "none" if routing is None else f"{routing['selector']}, S={groups['num_groups']}, K={groups['kept_groups']}"
    output_lora = None if stage2 is None else stage2["output_lora"]
    return _CARD.format(
        base=record["backbone"]["path"],
        title=record["training"].get("name", "subtoken adapter"),
        routers="" if routing is None else " and value-group routers",
        stages="" if stage2 is None else _stages_words(record["training"], output_lora),
        reducer=f"{reducer['name']}, keep ratio {reducer['keep_ratio']}",
        routing=words,
        lora=_plain(record["lora"]),
        output_row="" if output_lora is None else f"| LoRA on o_proj | {_plain(output_lora)} |\n",
        second="" if output_lora is None else _SECOND,
        fraction=budget.total_kv_fraction,
        training=_plain(record["training"]) or "not recorded",
    )


def _stages_words(training: dict[str, Any], output_lora: dict[str, Any] | None) -> str:
    parts = "routers" if output_lora is None else "routers and a LoRA on `o_proj`"
    return _STAGES.format(stage1=_plain(training.get("stage1", {})) or "not recorded", parts=parts)


def _plain(settings: dict[str, Any]) -> str:
    """``rank 8, alpha 16``; groups of settings are left out."""
    return ", ".join(f"{key} {value}" for key, value in settings.items() if not isinstance(value, dict))
