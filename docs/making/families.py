"""The page of backbone families."""

from __future__ import annotations

from making.cards import about, class_words, markdown
from making.methods import sample
from subtoken_train.errors import plain
from subtoken_train.families import FAMILIES
from subtoken_train.families.family import Family
from subtoken_train.reducers import REDUCERS

FAMILIES_HEAD = """# Backbone families

<!-- made by `python docs/generate.py` from the declarations in `subtoken_train/families/`; edit those -->

A backbone is read by its `model_type`, in transformers' own format, without remote code. The models below are known by
name, so that `check --offline` and `evaluate --check` need no network; others of the same `model_type` load
alike. *Reducers* are those that fit the model (`none` and `random` always do).

| backbone | model_type | pictures | licence | reducers |
|---|---|---|---|---|
"""


def families_page() -> str:
    """The text of ``families.md``."""
    rows, kinds = [], dict.fromkeys(FAMILIES.values())
    for family in kinds:
        for name, make in family.published.items():
            config = make()
            licence = family.licences.get(name)
            said = "ask the backbone" if licence is None else licence.name or licence.identifier
            rows.append(
                f"| {name} | `{config.model_type}` | {_pictures(family)} | {said} | {_fitting(family, config)} |\n"
            )
    return "".join([FAMILIES_HEAD, *rows, *map(_family_card, kinds)])


def _pictures(family: type[Family]) -> str:
    if not family.sees_images:
        return "none"
    return "images, videos" if family.takes_videos else "images"


def _fitting(family: type[Family], config: object) -> str:
    """Reducers that fit a published model."""
    depth, fit = config.get_text_config(decoder=True).num_hidden_layers, []
    for name in sorted(set(REDUCERS) - {"none", "random"}):
        try:
            sample(REDUCERS[name]).check_fit(family.name, family.sees_images, depth, family.tower_statistics(config))
        except ValueError:
            continue
        fit.append(f"`{name}`")
    if not family.sees_images:
        fit.append("[evictions](reducers.md#evictions-of-a-texts-context)")
    return ", ".join(fit)


def _family_card(family: type[Family]) -> str:
    """A section: the module's docstring (the class's, if families share the module), and what the family declares."""
    shared = sum(kind.__module__ == family.__module__ for kind in set(FAMILIES.values())) > 1
    title, text = (part.strip() for part in (class_words(family).partition("\n")[::2] if shared else about(family)))
    kinds = ", ".join(f"`{kind}`" for kind in FAMILIES if FAMILIES[kind] is family)
    inputs = ", ".join(f"`{name}`" for name in family.image_inputs) if family.sees_images else "none"
    facts = f"Read for `model_type` {kinds}. Inputs of pictures: {inputs}. LoRA on `{markdown(family.lora_pattern)}`."
    return (
        "\n".join(part for part in (f"\n## {plain(family.name)}\n", f"{title}\n", text and f"{text}\n", facts) if part)
        + "\n"
    )
