"""The matched token-only anchor of a recipe: the same training without routing, at the token keep ratio of equal bytes.

Under a value gate the fair twin keeps the gate, over every group. No group is dropped there, so none is filled.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from subtoken_train.cli.recipe_source import read_recipe, read_source
from subtoken_train.errors import shell_words
from subtoken_train.outputs import check_new, write_whole

if TYPE_CHECKING:
    from subtoken_train.cli.recipe import RecipeCLI
    from subtoken_train.reducers.base import Reducer

SUFFIX = "_anchor"


def anchor_settings(cli: RecipeCLI) -> dict[str, Any]:
    """Return the settings in which an anchor's recipe differs: dotted key -> value.

    The keep ratio is r (1 + K/S) / 2, and ``matches`` is r: the reducer rounds the arm's own count up to whole tokens.
    Where the lower layers stay whole, or something is stored once per sample, it is solved from the ledger of one
    prompt.
    """
    module = cli.model
    routing, reducer = module.routing_config, module.reducer_config
    if routing is None:
        raise ValueError("the recipe routes nothing (model.routing is null), so it has no anchor; it may be one itself")
    if not routing.drops:
        all_bytes = " and byte_share = 1" if routing.budget == "bytes" else ""
        raise ValueError(
            f"the recipe keeps all {routing.num_groups} groups (kept_groups = num_groups{all_bytes}), so it has no "
            "anchor; it is a token-only arm itself"
        )
    if reducer.name == "none":
        raise ValueError(
            "reducer 'none' keeps every token, and an anchor must drop some to have the recipe's bytes; choose its "
            "reducer with --model.reducer.name"
        )
    reducer.check_anchor()
    anchor = _matched(cli)
    settings: dict[str, Any] = {"output_dir": f"{cli.output_dir}{SUFFIX}"}
    settings |= {f"model.reducer.{key}": getattr(anchor, key) for key in ("keep_ratio", "round_up", "matches")}
    if routing.value_gate:
        settings |= {"model.routing.kept_groups": routing.num_groups, "model.routing.balance_weight": 0.0}
        settings |= {} if routing.fill == "zero" else {"model.routing.fill": "zero"}
        settings |= {"model.routing.byte_share": 1.0} if routing.budget == "bytes" else {}
    else:
        settings["model.routing"] = None
    if module.read_first_stage() is not None:
        settings |= {f"model.lora.{name}": getattr(module.lora_settings, name) for name in ("rank", "alpha", "dropout")}
        settings["model.stage2"] = None
    return settings


def anchor_words(argv: list[str]) -> list[str]:
    """The command line that trains the anchor of a command line's recipe."""
    from subtoken_train.cli.recipe import RecipeCLI

    settings = anchor_settings(RecipeCLI(read_source(argv)))
    if not any(word.startswith("--push_to_hub") for word in argv):  # where the recipe publishes its own adapter
        settings["push_to_hub"] = None
    return argv + [f"--{key}={yaml.safe_dump(value).splitlines()[0]}" for key, value in settings.items()]


def write_anchor(source: Path, destination: Path, overwrite: bool) -> Path:
    """Write the recipe of an anchor to a file, or into a folder as ``NAME_anchor.yaml``; returns where it went."""
    target = destination / f"{source.stem}{SUFFIX}.yaml" if destination.is_dir() else destination
    check_new([target], overwrite)
    write_whole(target, anchor_text(source, target), overwrite)
    return target


def anchor_text(source: Path, target: Path) -> str:
    """The recipe of the anchor of ``source``, as a file that will lie at ``target``."""
    content = read_recipe(source)
    from subtoken_train.cli.terminal import quiet_libraries

    quiet_libraries()
    from subtoken_train.cli.recipe import RecipeCLI

    settings = anchor_settings(RecipeCLI(["--config", str(source)]))
    for key, value in settings.items():
        *groups, last = key.split(".")
        group = content
        for name in groups:
            group = group.setdefault(name, {})
        group[last] = value
    content.pop("push_to_hub", None)
    share = settings["model.reducer.keep_ratio"]
    header = (
        f"# matched token-only anchor of {shell_words(source.stem)} · {100 * share:.6g} % of the tokens, every group\n"
        f"#\n#   train   subtoken-train fit --config {shell_words(target)}\n"
    )
    return header + yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120)


def _matched(cli: RecipeCLI) -> Reducer:
    """Return the anchor's reducer; a backbone is only laid out where its depth or a prompt's length matters."""
    from subtoken_train.reducers.base import matched_reducer
    from subtoken_train.training.preflight import lay_out, nominal_prompt

    routing, reducer = cli.model.routing_config, cli.model.reducer_config
    assert routing is not None
    budget, layers, tokens = routing.token_budget, 1, 1
    if reducer.stage == "decoder" or budget.stores_fill:
        parts = lay_out(cli.model)
        layers, tokens = parts.family.shape.num_layers, nominal_prompt(parts.family, cli.datamodule).tokens
    return matched_reducer(reducer, budget, layers, tokens)
