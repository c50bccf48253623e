"""``subtoken-train check``: what a recipe trains, keeps and needs, before it runs."""

import json
import os
import platform
import shutil
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from subtoken_train.cli.recipe_source import read_source
from subtoken_train.cli.terminal import quiet_libraries
from subtoken_train.errors import check_word, shell_words
from subtoken_train.kernels.choice import choose_kernel
from subtoken_train.version import __version__

HELP = """usage: subtoken-train check --config RECIPE.yaml [--KEY VALUE ...] [--offline]
       subtoken-train check --machine [--json]

Says before a run: the settings, what trains (exact counts), the KV budget per region and layer with the matched
token-only anchor, memory, data, optimiser steps, GPU hours, disk, and what is missing with the command that fetches it.
Any key of the recipe can be overridden after --config, as for fit; --config also takes a shipped recipe's name.
--offline reads no data and no stage-1 adapter, and contacts no server. Without it the data files are parsed and up to
200 records encoded; weights of 64 MiB or less are loaded, and four batches timed, where training is to run on the CPU.

What fit would refuse is refused here (exit code 2). Otherwise the last line is 'ready: ...', or 'valid: ...' if the
recipe is right but this machine or its output folder stands in the way, as the lines below it say (exit code 0).
--machine, or 'subtoken-train env', prints versions and hardware alone, for bug reports; --json as one JSON object."""

OFFLINE, MACHINE, JSON = "--offline", "--machine", "--json"
PACKAGES: tuple[str, ...] = ("torch", "lightning", "transformers", "peft", "datasets", "torchmetrics")
PACKAGES += ("bitsandbytes", "deepspeed", "triton")


def run_raw(argv: list[str]) -> int:
    if MACHINE in argv:
        for word in (given := [word for word in argv if word != MACHINE]):
            check_word("option", word, [JSON])
        facts = environment()
        width = max(map(len, facts))
        rows = [f"{name:<{width}}  {'none found' if fact is None else fact}" for name, fact in facts.items()]
        print(json.dumps(facts, indent=2) if given else "\n".join(rows))
        return 0
    offline = OFFLINE in argv
    if offline:
        os.environ["HF_HUB_OFFLINE"] = "1"
    recipe = [word for word in argv if word != OFFLINE]
    source = read_source(recipe)
    quiet_libraries()
    from subtoken_train.artifact.hub import check_fetched
    from subtoken_train.cli import run_plan
    from subtoken_train.cli.check_lines import check_ready, data_lines, obstacles, settings_lines
    from subtoken_train.cli.recipe import RecipeCLI
    from subtoken_train.datasets.datamodule import RecallDataModule
    from subtoken_train.families.backbone_config import check_named, is_hub_id
    from subtoken_train.families.load import check_weights, family_class
    from subtoken_train.training.memory import estimate_memory
    from subtoken_train.training.preflight import check_bytes, lay_out, nominal_prompt

    cli = RecipeCLI(source)
    check_named(cli.model.backbone_config)
    check_fetched(cli.model.backbone_config.path)
    if not is_hub_id(cli.model.backbone_config.path):
        check_weights(family_class(cli.model.backbone_config), cli.model.backbone_config)
    parts = lay_out(cli.model, offline)
    prompt = nominal_prompt(parts.family, cli.datamodule)
    check_bytes(parts, prompt)
    check_ready(cli, parts, offline)
    step, reading = run_plan.training_step(cli, parts, prompt), run_plan.Reading()
    estimate = estimate_memory(parts, step)
    memory = [*run_plan.memory_lines(estimate, step)]
    if isinstance(cli.datamodule, RecallDataModule):
        memory.insert(0, "a sample is assumed to be twice as long as its context")
    steps = (
        ("recipe", settings_lines(cli, parts, prompt, offline)),
        ("what trains", run_plan.training_lines(parts)),
        (prompt.title, run_plan.budget_lines(parts, prompt)),
        ("peak memory of one device (a prediction)", memory),
        ("data and steps", data_lines(cli, parts, offline, reading)),
    )
    for number, (title, lines) in enumerate(steps, start=1):
        print(f"{number}/{len(steps)} {title}", *(f"  {line}" for line in lines), "", sep="\n")
    needs = run_plan.plan_of_fit(cli, parts, prompt, reading).lines()
    print("what it needs (a prediction)", *(f"  {line}" for line in needs), "", sep="\n")
    if reading.stops:
        raise ValueError(f"fit would stop: {reading.stops[0]}")
    command, in_the_way = shell_words("subtoken-train", "fit", *recipe), list(obstacles(cli, estimate.total))
    print(f"{'valid' if in_the_way else 'ready'}: {command}", *in_the_way, sep="\n")
    return 0


def environment() -> dict[str, str | int | None]:
    """Return the facts that a bug report needs, by name; ``nvidia_smi`` is the driver tool's path, None without one."""
    found = dict.fromkeys(PACKAGES, "not installed")
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return {
        "subtoken_train": __version__,
        "python": platform.python_version(),
        **found,
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "nvidia_smi": (driver := shutil.which("nvidia-smi")),
        "kernel": str(choose_kernel("cuda" if driver else "cpu")),
        "decoding": "captured in CUDA graphs" if driver else "step by step, because only CUDA has graphs",
    }
