"""Predicted peak memory of the paper's recipes on one GPU, as they are and with the overlays of recipes/memory.

python benchmarks/recipe_memory.py        # the table of docs/memory.md
"""

from benchmarks.pairs import markdown
from subtoken_train.cli.recipe import RecipeCLI
from subtoken_train.cli.run_plan import training_step
from subtoken_train.cli.terminal import quiet_libraries
from subtoken_train.training.memory import MemoryEstimate, estimate_memory
from subtoken_train.training.preflight import lay_out, nominal_prompt

NAMES = (
    "llava7b_fastv25_s16k4", "llava13b_fastv25_s16k4", "qwenvl7b_fastv25_s16k4", "llama7b_quest25_s8k7",
    "qwen7b_quest25_s8k7",
)  # fmt: skip
OVERLAYS = ("qlora_nf4", "int8")


def predict(name: str, overlay: str | None = None) -> MemoryEstimate:
    """The figures of ``subtoken-train check --offline``."""
    argv = ["--config", name]
    if overlay is not None:
        argv += ["--config", f"recipes/memory/{overlay}.yaml"]
    cli = RecipeCLI(argv)
    parts = lay_out(cli.model, offline=True)
    return estimate_memory(parts, training_step(cli, parts, nominal_prompt(parts.family, cli.datamodule)))


def table() -> str:
    """Frozen weights and peak of every recipe, plain and with each overlay, in GiB."""
    heads = ("as it is", *OVERLAYS)
    rows = []
    for name in NAMES:
        found = [predict(name, overlay) for overlay in (None, *OVERLAYS)]
        rows.append([name, *(f"{made.total / 2**30:.1f} ({made.parts[0][1] / 2**30:.1f} frozen)" for made in found)])
    return markdown(["recipe", *heads], rows)


if __name__ == "__main__":
    quiet_libraries()
    print(table())
