"""``subtoken-train recipes ls|show|copy|anchor``: the recipes that travel with the package, and anchors of any.

The matched token-only anchor of a recipe is the same training without routing, at the token keep ratio of equal bytes.
Under a value gate the fair twin keeps the gate, over every group. No group is dropped there, so none is filled.
"""

import errno
import os
from argparse import ArgumentParser, Namespace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from subtoken_train import resources
from subtoken_train.cli.recipe_source import read_recipe, read_source
from subtoken_train.cli.terminal import quiet_libraries
from subtoken_train.errors import refuse, shell_words, unknown_name
from subtoken_train.outputs import check_new, write_whole

if TYPE_CHECKING:
    from subtoken_train.cli.recipe import RecipeCLI

HELP = """The recipes that ship with the package: commented YAML files, and names made of a file and a few settings.

A recipe's name is enough in any folder and for every command: fit --config tiny_fastv25_s16k4, or as it is written
elsewhere, recipes/tiny_fastv25_s16k4.yaml. If you have a file at that very path, it is used instead.

  subtoken-train recipes ls
  subtoken-train recipes ls llava7b visionzip
  subtoken-train recipes show tiny_fastv25_s16k4
  subtoken-train recipes copy tiny_fastv25_s16k4 my_run.yaml
  subtoken-train recipes schema > recipe.schema.json              for editors and checks; --grid: of grids
  subtoken-train recipes anchor my_run.yaml                       the matched token-only anchor: my_run_anchor.yaml"""
SUFFIX = "_anchor"


def add_arguments(parser: ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("ls", help="names and first lines, by model; a grid's begins with 'grid'")
    words = "show only recipes whose folder, name or first line has every word"
    listing.add_argument("word", metavar="WORD", nargs="*", help=words)
    actions.add_parser("show", help="print a recipe").add_argument("name", metavar="NAME")
    schema = actions.add_parser("schema", help="print the JSON schema of recipes")
    schema.add_argument("--grid", action="store_true", help="that of grids")
    for action, words, name, names, place in (
        ("copy", "write a recipe to a file of your own", "NAME", None, "DEST"),
        ("anchor", "write the recipe of a recipe's matched token-only anchor", "FILE", _NAMES, "OUT"),
    ):
        writing = actions.add_parser(action, help=words)
        writing.add_argument("name", metavar=name, help=names)
        writing.add_argument("destination", metavar=place, type=Path, nargs="?", default=Path(), help=_PLACE)
        writing.add_argument("--overwrite", action="store_true", help="replace an existing file")


_NAMES, _PLACE = "a recipe's file, or a shipped recipe's name", "file or folder (.)"


def run(args: Namespace) -> int:
    if args.action == "ls":
        lines = {}
        for name, path in resources.recipe_files().items():
            kind = "grid · " if resources.is_grid(resources.recipe_text(path)) else ""
            lines[name] = f"{kind}{resources.first_comment(path)}"
        chosen = [name for name in lines if all(word.lower() in f"{name} {lines[name]}".lower() for word in args.word)]
        missing = f"no recipe has {' and '.join(args.word)} in its name or first line; 'recipes ls' lists all"
        refuse((not chosen, missing))
        width = max(len(name.rpartition("/")[2]) for name in chosen)
        for folder, names in groupby(chosen, key=lambda name: name.rpartition("/")[0]):
            rows = (f"  {name.rpartition('/')[2]:<{width}}  {lines[name]}".rstrip() for name in names)
            print(f"{folder}/", *rows, sep="\n")
        return 0
    if args.action == "schema":
        schema = resources.resource(f"recipes/{'grid' if args.grid else 'recipe'}.schema.json")
        print(schema.read_text(encoding="utf-8"), end="")
        return 0
    anchors = args.action == "anchor"
    source = resources.find_recipe(args.name) if anchors else resources.shipped_recipe(args.name)
    if source is None:
        raise unknown_name("recipe", args.name, [path.stem for path in resources.recipe_files().values()])
    if args.action == "show":
        print(resources.recipe_text(source), end="", flush=True)
        return 0
    name = f"{source.stem}{SUFFIX}.yaml" if anchors else source.name
    target = args.destination / name if args.destination.is_dir() else args.destination
    check_new([target], args.overwrite)
    if args.action == "copy" and not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(target))
    text = anchor_text(source, target) if anchors else resources.with_schema(resources.recipe_text(source))
    write_whole(target, text, args.overwrite)
    print(f"wrote {target}")
    return 0


def anchor_settings(cli: "RecipeCLI") -> dict[str, Any]:
    """Return the settings in which an anchor's recipe differs: dotted key -> value.

    The keep ratio is r (1 + K/S) / 2, and ``matches`` is r: the reducer rounds the arm's own count up to whole tokens.
    Where the lower layers stay whole, or something is stored once per sample, it is solved from the ledger of one
    prompt.
    """
    from subtoken_train.reducers.base import matched_reducer
    from subtoken_train.training.preflight import lay_out, nominal_prompt

    module = cli.model
    routing, reducer = module.routing_config, module.reducer_config
    if routing is None:
        raise ValueError("the recipe routes nothing (model.routing is null), so it has no anchor; it may be one itself")
    all_bytes = " and byte_share = 1" if routing.budget == "bytes" else ""
    groups = f"the recipe keeps all {routing.num_groups} groups (kept_groups = num_groups{all_bytes})"
    tokens = "reducer 'none' keeps every token, and an anchor must drop some to have the recipe's bytes"
    gates = "gates keep more of one prompt and less of another, so that no anchor has their bytes"
    refuse(
        (routing.budget == "delayed", f"{gates}; compare at the size that is measured"),
        (not routing.drops, f"{groups}, so it has no anchor; it is a token-only arm itself"),
        (reducer.name == "none", f"{tokens}; choose its reducer with --model.reducer.name"),
    )
    reducer.check_anchor()
    budget, layers, before = routing.token_budget, 1, 1
    if reducer.stage == "decoder" or budget.stores_fill:  # depth and a prompt's length matter
        parts = lay_out(module)
        layers, before = parts.family.shape.num_layers, nominal_prompt(parts.family, cli.datamodule).tokens
    anchor = matched_reducer(reducer, budget, layers, before)
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
    """Return the command line that trains the anchor of a command line's recipe."""
    from subtoken_train.cli.recipe import RecipeCLI

    settings = anchor_settings(RecipeCLI(read_source(argv)))
    if not any(word.startswith("--push_to_hub") for word in argv):  # where the recipe publishes its own adapter
        settings["push_to_hub"] = None
    return argv + [f"--{key}={yaml.safe_dump(value).splitlines()[0]}" for key, value in settings.items()]


def anchor_text(source: Path, target: Path) -> str:
    """Write the recipe of the anchor of ``source``, as a file that will lie at ``target``."""
    content = read_recipe(source)
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
    share = f"{100 * settings['model.reducer.keep_ratio']:.6g} % of the tokens, every group"
    header = f"# matched token-only anchor of {shell_words(source.stem)} · {share}\n#\n"
    header += f"#   train   subtoken-train fit --config {shell_words(target)}\n"
    return header + yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120)
