"""``subtoken-train recipes ls|show|copy|anchor``: the recipes that travel with the package, and anchors of any."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from subtoken_train.errors import unknown_name
from subtoken_train.resources import resource

HELP = """The recipes that travel with the package: one commented YAML per run.

  subtoken-train recipes ls
  subtoken-train recipes ls llava7b visionzip
  subtoken-train recipes show tiny_fastv25_s16k4
  subtoken-train recipes copy tiny_fastv25_s16k4 my_run.yaml
  subtoken-train recipes anchor my_run.yaml                       the matched token-only anchor: my_run_anchor.yaml"""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the actions."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("ls", help="names and first lines")
    listing.add_argument("word", metavar="WORD", nargs="*", help="only recipes whose name or first line has every word")
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


def recipe_files() -> dict[str, Path]:
    """Every shipped recipe by name, its path below ``recipes/`` without the suffix, sorted."""
    folder = resource("recipes")
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in sorted(folder.rglob("*.yaml"))}


def recipe_file(name: str) -> Path:
    """The file of one recipe; ``.yaml`` may be written or left out.

    Raises:
        ValueError: there is no such recipe.
    """
    files = recipe_files()
    key = name.removesuffix(".yaml")
    if key not in files:
        raise unknown_name("recipe", name, files)
    return files[key]


def first_comment(path: Path) -> str:
    """The first comment line of a file, without its marker; empty if there is none."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return next((line.lstrip("# ").rstrip() for line in lines if line.startswith("#")), "")


def list_recipes(words: Sequence[str] = ()) -> None:
    """Print the name and the first comment line of each recipe that has all ``words``, whatever their case.

    Raises:
        ValueError: no recipe has them.
    """
    lines = {name: first_comment(path) for name, path in recipe_files().items()}
    chosen = {
        name: line for name, line in lines.items() if all(word.lower() in f"{name} {line}".lower() for word in words)
    }
    if not chosen:
        raise ValueError(f"no recipe has {' and '.join(words)} in its name or first line; 'recipes ls' lists all")
    width = max(map(len, chosen))
    for name, line in chosen.items():
        print(f"{name:<{width}}  {line}".rstrip())


def copy_recipe(source: Path, destination: Path, overwrite: bool) -> Path:
    """Copy a recipe to a file, or into a folder, and return where it went.

    Raises:
        FileExistsError: the file exists and ``overwrite`` is off.
    """
    target = destination / source.name if destination.is_dir() else destination
    if target.exists() and not overwrite:
        raise FileExistsError(f"{target} exists; give another name or --overwrite")
    target.write_bytes(source.read_bytes())
    return target


def run(args: Namespace) -> int:
    """Carry out the chosen action."""
    if args.action == "ls":
        list_recipes(args.word)
    elif args.action == "show":
        print(recipe_file(args.name).read_text(encoding="utf-8"), end="")
    elif args.action == "anchor":
        from subtoken_train.cli.anchor import write_anchor

        print(f"wrote {write_anchor(args.name, args.destination, args.overwrite)}")
    else:
        print(f"wrote {copy_recipe(recipe_file(args.name), args.destination, args.overwrite)}")
    return 0
