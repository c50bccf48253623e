"""The page of backbone families."""

from __future__ import annotations

import torch
import transformers

from making.cards import about, class_words, markdown
from making.methods import unfit
from subtoken_train.errors import plain
from subtoken_train.families import FAMILIES
from subtoken_train.families.decoder import layer_windows
from subtoken_train.families.family import Family
from subtoken_train.families.proof import check_structure
from subtoken_train.reducers import REDUCERS

FAMILIES_HEAD = """# Backbone families

<!-- made by `python docs/generate.py` from the declarations in `subtoken_train/families/`; edit those -->

A backbone is read by its `model_type`, in transformers' own format, without remote code. The models below are known by
name, so that `check --offline` and `evaluate --check` need no network; others of the same `model_type` load
alike. *Reducers* are those that fit the model (`none`, `random` and `uniform` always do). Refused before weights are
read: Gemma 3 with images (`gemma3`), whose image tokens attend in both directions where every prompt is read causally
here; Gemma 4 (`gemma4`), whose layers have heads of two widths; Qwen3.5 (`qwen3_5`), most of whose layers keep a state
instead of keys and values; LLaVA-OneVision-1.5 and others that are published with code of their own, which is never
run.

| backbones | model_type | pictures | licence | reducers |
|---|---|---|---|---|
"""

DECODERS_HEAD = """
## Other language models

Any other language model of transformers is looked at, not looked up: `check --offline` and every command that loads one
say before a weight is read what of it is not served, and a loaded one is run on 24 random tokens, the last six decoded
from a packed cache, beside transformers' own forward (`families/proof.py`). In fp32 logits
must agree to 1e-4 of the largest one; in bf16 and fp16 to 0.01 and twice what the model's own answer changes by between
transformers' `sdpa` and `eager`. A sliding layer stores what is in its window, and nothing else of a prompt. These have
been tested on tiny random models, cell by cell against a full recompute:

| class | served | what is its own, or why not |
|---|---|---|
"""
_HAS = {
    "Llama": "scaled rotary frequencies (3.1)",
    "Mistral": "one window for all layers",
    "Ministral3": "one window for all layers, queries that grow with their position",
    "Qwen2": "windows in some layers",
    "Qwen3": "windows in some layers, queries and keys normed by head",
    "Qwen3Moe": "experts",
    "SmolLM3": "layers without rotary positions",
    "Phi3": "one projection to queries, keys and values, whose LoRA adapts the keys too; heads that are turned in part",
    "Olmo3": "windows in some layers, queries and keys normed all heads together, no norm before the attention",
    "Granite": "factors of embeddings, scores, residuals and logits",
    "Glm4": "heads that are turned in part, pairs of channels side by side",
    "Gemma3Text": "windows in most layers, a rotary base for each kind of layer, its own scale of scores",
}
_NOT = ("Gemma2", "Gemma4Text", "GptOss", "Qwen3_5Text", "DeepseekV3", "Mamba", "GPT2")


def families_page() -> str:
    """The text of ``families.md``."""
    kinds, models = dict.fromkeys(FAMILIES.values()), dict[str, list[str]]()
    for family in kinds:
        for name, make in family.published.items():
            config, licence = make(), family.licences.get(name)
            said = "ask the backbone" if licence is None else licence.name or licence.identifier
            facts = f"`{config.model_type}` | {_pictures(family)} | {said} | {_fitting(family, config)}"
            models.setdefault(facts, []).append(name)
    rows = [f"| {', '.join(names)} | {facts} |\n" for facts, names in models.items()]
    return "".join([FAMILIES_HEAD, *rows, *map(_family_card, kinds), DECODERS_HEAD, *map(_decoder_row, (*_HAS, *_NOT))])


def _decoder_row(name: str) -> str:
    """A row of the table of decoders; whether one is served is asked of the class, on two layers without weights."""
    config, why = getattr(transformers, f"{name}Config")(num_hidden_layers=2), None
    try:
        layer_windows(config)
        with torch.device("meta"):
            check_structure(transformers.AutoModelForCausalLM.from_config(config))
    except ValueError as error:
        what, _, why = str(error).partition(";")[0].partition(" is not supported: ")
        why = f"{what.partition(' with ')[2]}: {why}" if " with " in what else why
    assert (why is None) == (name in _HAS), f"{name}: {why}"
    served = "no" if why else "yes"
    return f"| {name.removesuffix('Text')} (`{config.model_type}`) | {served} | {markdown(why or _HAS[name])} |\n"


def _pictures(family: type[Family]) -> str:
    if not family.sees_images:
        return "none"
    return "images, videos" if family.takes_videos else "images"


def _fitting(family: type[Family], config: object) -> str:
    """Reducers that fit a published model."""
    names = sorted(set(REDUCERS) - {"none", "random", "uniform"})
    fit = [f"`{name}`" for name in names if unfit(REDUCERS[name], family, config) is None]
    if not family.sees_images:
        fit.append("[evictions](methods.md)")
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
