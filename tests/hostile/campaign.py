"""The classes of hostile input, many cases in a row, and what came of them in numbers."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from subtoken_train.kernels.native import library
from tests.hostile import command_lines, models, outputs, own_data, pictures, recipes, requests
from tests.hostile.case import Expect, Outcome, Place, Verdict, install_canary
from tests.hostile.pool import REPOSITORY
from tests.hostile.runner import Make, run_case, snapshot

CLASSES: dict[str, tuple[Make, int]] = {
    "recipes": (recipes.fields, 4), "recipe_files": (recipes.texts, 3), "recipe_code": (recipes.code, 4),
    "adapters": (models.adapters, 6), "runs": (models.runs, 3), "results": (own_data.results, 6),
    "grids": (recipes.grids, 4), "data_files": (own_data.data_files, 3), "pictures": (pictures.damage, 5),
    "picture_forms": (pictures.forms, 4), "arguments": (command_lines.arguments, 8), "folders": (outputs.folders, 4),
    "benchmark_files": (own_data.benchmarks, 4), "backbones": (models.backbones, 4), "calls": (requests.calls, 4),
    "calibrations": (models.calibrations, 3), "caches": (models.caches, 4), "own_folders": (own_data.own_folders, 5),
    "odd_paths": (command_lines.odd_paths, 4),
    "full_disks": (outputs.full_disks, 2), "prompt_files": (own_data.prompt_files, 3), "prompts": (requests.prompts, 3),
    "demo_requests": (requests.demo, 3), "chat_requests": (requests.chat, 3), "http_requests": (requests.http, 3),
}  # fmt: skip
"""Generator and weight by name: a weight of 2 draws twice as many cases as one of 1."""
COUNTED = {
    "tracebacks": Verdict.TRACEBACK, "hangs": Verdict.HANG, "wrong_acceptances": Verdict.WRONG,
    "code_run": Verdict.CODE, "lost": Verdict.LOST, "memory": Verdict.MEMORY, "left_behind": Verdict.LEFT,
    "messages": Verdict.MESSAGE, "wrong_refusals": Verdict.REFUSAL,
}  # fmt: skip


def plan(seed: int, count: int, names: Sequence[str] = ()) -> list[tuple[str, int]]:
    """Class and seed of every case, the classes in turn by their weights, so that any stretch holds all of them."""
    chosen = {name: weight for name, (_, weight) in CLASSES.items() if not names or name in names}
    places = sorted(((turn + 0.5) / weight, name) for name, weight in chosen.items() for turn in range(weight))
    order = [name for _, name in places]
    return [(order[i % len(order)], seed * 1_000_000 + i) for i in range(count)]


def run_cases(cases: Iterable[tuple[str, int]], folder: Path, pool: Path) -> Iterator[Outcome]:
    """Run and judge the cases one after another in this process; one more follows where originals have changed."""
    library()  # a process that decodes starts a C compiler once, whatever it was given
    install_canary(folder / "modules")
    shared = (pool, REPOSITORY / "recipes", REPOSITORY / "checkpoints", REPOSITORY / "data/digits")
    before = [snapshot(place) for place in shared]
    for name, seed in cases:
        yield run_case(name, CLASSES[name][0], seed, Place(folder / "case", pool))
    for place, then in zip(shared, before, strict=True):
        now = snapshot(place)
        changed = sorted(path for path in then.keys() | now.keys() if then.get(path) != now.get(path))
        changed = [path for path in changed if "__pycache__" not in path]
        if changed:
            yield Outcome("shared:0", f"what {place} holds", Verdict.LOST, f"{changed[:5]}", Expect.REFUSED, None, 0.0)


def bad(outcomes: Sequence[Outcome]) -> list[str]:
    return [f"{o.name} {o.verdict}: {o.what}\n    {o.detail}" for o in outcomes if o.verdict is not Verdict.CLEAN]


def counts(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    verdicts = Counter(outcome.verdict for outcome in outcomes)
    expected = Counter(outcome.expect for outcome in outcomes)
    codes = Counter(outcome.code for outcome in outcomes)
    return {
        "cases": len(outcomes), "clean": verdicts[Verdict.CLEAN],
        **{name: verdicts[verdict] for name, verdict in COUNTED.items()}, "known_invalid": expected[Expect.REFUSED],
        "known_valid": expected[Expect.TAKEN],
        "compared": sum(outcome.compared for outcome in outcomes), "refused": codes[2], "accepted": codes[0],
    }  # fmt: skip
