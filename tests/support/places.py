"""Where the project keeps what tests read, and where real models may lie."""

from pathlib import Path

import pytest

from subtoken_train.resources import read_names

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes"
ON_AN_INDEX = False
"""Whether ``pip install subtoken_train`` finds the package; until then pages and notebooks install a checkout."""


def recipe(name: str) -> Path:
    """Return the path of a run's recipe; no file lies there where the recipe is a name (``resources.recipe_text``)."""
    path = RECIPES / f"{name}.yaml"
    assert path.is_file() or name in read_names(RECIPES), f"no recipe {name}"
    return path


def run_recipes() -> list[Path]:
    """Return the paths of the recipes of runs, files and names: all but grids, lists of arms and overlays."""
    return sorted({*RECIPES.glob("*.yaml"), *(RECIPES / f"{name}.yaml" for name in read_names(RECIPES))})


def shown(page: Path, name: str) -> str:
    """Return what stands on a page between the marks ``NAME:start`` and ``NAME:end``."""
    text = page.read_text(encoding="utf-8")
    return text.split(f"<!-- {name}:start -->\n")[1].split(f"\n<!-- {name}:end -->")[0]


def real_folder(name: str) -> Path:
    folder = ROOT / "checkpoints" / name
    if not (folder / "config.json").is_file():
        pytest.skip(f"checkpoints/{name} is absent; `subtoken-train data {name}` fetches it")
    return folder


def real_model(name: str):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from subtoken_train import SubTokenModel

    folder = real_folder(name)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return SubTokenModel(model, AutoTokenizer.from_pretrained(folder))
