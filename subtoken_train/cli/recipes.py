"""``subtoken-train recipes ls|show|copy|anchor``: the recipes that travel with the package, and anchors of any."""

from __future__ import annotations

import errno
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from subtoken_train.errors import unknown_name
from subtoken_train.outputs import check_new, write_whole
from subtoken_train.resources import find_recipe, first_comment, recipe_files, recipe_text, shipped_recipe

HELP = """The recipes that ship with the package: commented YAML files, and names made of a file and a few settings.

A recipe's name is enough in any folder and for every command: fit --config tiny_fastv25_s16k4, or as it is written
elsewhere, recipes/tiny_fastv25_s16k4.yaml. If you have a file at that very path, it is used instead.

  subtoken-train recipes ls
  subtoken-train recipes ls llava7b visionzip
  subtoken-train recipes show tiny_fastv25_s16k4
  subtoken-train recipes copy tiny_fastv25_s16k4 my_run.yaml
  subtoken-train recipes anchor my_run.yaml                       the matched token-only anchor: my_run_anchor.yaml"""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the actions."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("ls", help="names and first lines, by model")
    listing.add_argument(
        "word", metavar="WORD", nargs="*", help="show only recipes whose folder, name or first line has every word"
    )
    show = actions.add_parser("show", help="print a recipe")
    show.add_argument("name", metavar="NAME")
    copy = actions.add_parser("copy", help="write a recipe to a file of your own")
    copy.add_argument("name", metavar="NAME")
    copy.add_argument("destination", metavar="DEST", type=Path, nargs="?", default=Path(), help="file or folder (.)")
    copy.add_argument("--overwrite", action="store_true", help="replace an existing file")
    anchor = actions.add_parser("anchor", help="write the recipe of a recipe's matched token-only anchor")
    anchor.add_argument("name", metavar="FILE", help="a recipe's file, or a shipped recipe's name")
    anchor.add_argument("destination", metavar="OUT", type=Path, nargs="?", default=Path(), help="file or folder (.)")
    anchor.add_argument("--overwrite", action="store_true", help="replace an existing file")


def list_recipes(words: Sequence[str] = ()) -> None:
    """Print name and first comment line of each recipe that has all ``words``, whatever their case, by folder."""
    chosen = {}
    for name, path in recipe_files().items():
        line = first_comment(path)
        if all(word.lower() in f"{name} {line}".lower() for word in words):
            chosen[name] = line
    if not chosen:
        raise ValueError(f"no recipe has {' and '.join(words)} in its name or first line; 'recipes ls' lists all")
    width = max(len(name.rpartition("/")[2]) for name in chosen)
    for folder, names in groupby(chosen, key=lambda name: name.rpartition("/")[0]):
        print(f"{folder}/")
        for name in names:
            print(f"  {name.rpartition('/')[2]:<{width}}  {chosen[name]}".rstrip())


def copy_recipe(source: Path, destination: Path, overwrite: bool) -> Path:
    """Copy a recipe to a file, or into a folder, and return the new file."""
    target = destination / source.name if destination.is_dir() else destination
    check_new([target], overwrite)
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(target))
    write_whole(target, recipe_text(source).encode(), overwrite)
    return target


def say_needs(path: Path) -> None:
    """Print to stderr what a run's recipe needs, so that stdout stays the recipe; nothing for overlays and grids.

    Where the backbone must be there to tell, it says so.
    """
    from subtoken_train.cli.recipe_source import BANDS, read_recipe

    if not set(BANDS[:3]) <= read_recipe(path).keys():
        return
    from subtoken_train.cli.terminal import quiet_libraries

    quiet_libraries()
    from subtoken_train.cli.run_plan import plan_of_recipe

    try:
        lines = list(plan_of_recipe(path).lines())
    except ValueError as error:
        lines = [f"not known: {error}"]
    print("\nwhat it needs (a prediction)", *(f"  {line}" for line in lines), sep="\n", file=sys.stderr)


def run(args: Namespace) -> int:
    """Carry out the chosen action."""
    if args.action == "ls":
        list_recipes(args.word)
        return 0
    source = find_recipe(args.name) if args.action == "anchor" else shipped_recipe(args.name)
    if source is None:
        raise unknown_name("recipe", args.name, [path.stem for path in recipe_files().values()])
    if args.action == "show":
        print(recipe_text(source), end="", flush=True)
        say_needs(source)
    elif args.action == "anchor":
        from subtoken_train.cli.anchor import write_anchor

        print(f"wrote {write_anchor(source, args.destination, args.overwrite)}")
    else:
        print(f"wrote {copy_recipe(source, args.destination, args.overwrite)}")
    return 0
