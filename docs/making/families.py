"""The page of backbone families."""

import torch
import transformers

from making.cards import about, class_words, markdown
from making.methods import unfit
from subtoken_train.families import FAMILIES
from subtoken_train.families.decoder import layer_windows
from subtoken_train.families.family import Family
from subtoken_train.families.proof import check_structure
from subtoken_train.reducers import REDUCERS

FAMILIES_HEAD = """# Backbone families

<!-- made by `python docs/generate.py` from the declarations in `subtoken_train/families/`; edit those -->

A backbone is recognised by its `model_type`; no remote code runs. `check --offline` knows the models below by name.
Other sizes and fine-tunes load alike.

Every model takes the [visual reducers](methods.md) `cdpruner`, `dart`, `divprune`, `fastv`, `prunesid`, `pyramiddrop`,
`sparsevlm`, `visionzip` and `vispruner`; the last column adds or removes some. Language models take `quest` and
evictions.

Refused before weights are read: Gemma 3 with images, whose image tokens attend in both directions. Gemma 4, with heads
of two widths. Qwen3.5, whose layers mostly keep a state instead of keys and values. Models that need code of their own.

| backbones | model_type | pictures | licence | reducers |
|---|---|---|---|---|
"""

COMMON = {"cdpruner", "dart", "divprune", "fastv", "prunesid", "pyramiddrop", "sparsevlm", "visionzip", "vispruner"}
FAMILY_HEAD = """
## Families

LoRA adapts q and v of the language model. The module of a family says how its pictures are cut and placed.

| model_type | what it is | inputs of pictures |
|---|---|---|
"""
DECODERS_HEAD = """
## Other language models

Any other language model of transformers is examined. `check --offline` says before a weight is read what is not served.
After loading, 24 random tokens are compared with transformers' own forward pass (`families/proof.py`). These classes
were tested on tiny random models, cell by cell against a full recompute:

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
    own = [FAMILIES_HEAD, *rows, FAMILY_HEAD, *map(_family_row, kinds), DECODERS_HEAD]
    return "".join([*own, *map(_decoder_row, (*_HAS, *_NOT))])


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
    """Reducers that fit a published model and not all that see images, and those that do not fit it alone."""
    if not family.sees_images:
        return ""
    names = set(REDUCERS) - {"none", "random", "uniform"}
    fit = {name for name in names if unfit(REDUCERS[name], family, config) is None}
    told = [f"`{name}`" for name in sorted(fit - COMMON)], [f"`{name}`" for name in sorted(COMMON - fit)]
    return "; ".join(f"{word} {', '.join(each)}" for word, each in zip(("also", "not"), told, strict=True) if each)


def _family_row(family: type[Family]) -> str:
    """The first line of the module's docstring (the class's, if families share the module), and what is declared."""
    shared = sum(kind.__module__ == family.__module__ for kind in set(FAMILIES.values())) > 1
    title = class_words(family).partition("\n")[0] if shared else about(family)[0]
    kinds = ", ".join(f"`{kind}`" for kind in FAMILIES if FAMILIES[kind] is family)
    return f"| {kinds} | {title} | {', '.join(f'`{name}`' for name in family.image_inputs)} |\n"
