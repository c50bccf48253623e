"""What ``gpu_suite.py`` runs: a unit is one measurement of one size, and the goals that it is held to.

Every unit is a call of a benchmark that is there for itself; goals stand here, sizes in ``gpu_sizes.py``.
"""

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks import decode, prefill
from benchmarks.gpu_kernels import compared_steps, packed_prompts, stored_steps
from benchmarks.gpu_sizes import Sizes
from benchmarks.pairs import ratio
from benchmarks.shaped import llama_config
from benchmarks.training_cases import Case
from benchmarks.training_cost import WARMUP, peak_bytes, sides, timed
from subtoken_train.benchmarking import paper_protocols
from subtoken_train.benchmarking.comparison import TOKEN_ONLY
from subtoken_train.cli.main import main as command
from subtoken_train.engine.build import assemble
from subtoken_train.training.memory import MemoryEstimate, Step, estimate_memory

ROOT = Path(__file__).resolve().parents[1]
LONG = 8192
"""Entries, or tokens, from which the goals of long contexts hold."""
COUNTS = re.compile(r"(\d+) (passed|failed|skipped|errors?|deselected)")


@dataclass(frozen=True)
class Settings:
    """Where, in which dtype, and how much."""

    device: str
    dtype: torch.dtype
    sizes: Sizes


Unit = Callable[[Settings], dict[str, Any]]
"""Gives what was measured, with its ``goals``."""


def goal(what: str, value: float, bound: float, least: bool = False) -> dict[str, Any]:
    """A goal and whether it is met: ``value`` at most ``bound``, or at least."""
    met = value >= bound if least else value <= bound
    return {"what": what, "value": value, "bound": f"{'>=' if least else '<='} {bound:g}", "met": met}


def gpu_tests(_: Settings) -> dict[str, Any]:
    """What ``pytest -m gpu`` says, on the files that name the mark."""
    files = sorted(str(path) for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text())
    # most of their time compiles kernels, which takes a core each
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "-n", "auto", *files]
    # a record is read elsewhere: of tracebacks and warnings it would hold this machine's paths
    command += ["--tb=no", "--disable-warnings"]
    if not files:
        return {"command": "pytest -m gpu", "note": "no test is marked gpu", "goals": []}
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    lines = run.stdout.replace(f"{ROOT}/", "").strip().splitlines()
    counts = {word: int(count) for count, word in COUNTS.findall(lines[-1] if lines else "")}
    return {
        "command": "pytest -m gpu", "exit_code": run.returncode, "counts": counts, "tail": lines[-40:],
        "goals": [
            goal("GPU tests that failed", counts.get("failed", 0) + counts.get("errors", counts.get("error", 0)), 0),
            goal("GPU tests that passed", counts.get("passed", 0), 1, least=True),
        ],
    }  # fmt: skip


def _decoder(given: Settings) -> decode.Decoder:
    return decode.Decoder(given.device, given.dtype, given.sizes.layers)


def _step_goals(name: str, row: dict[str, Any]) -> dict[str, Any]:
    where, bound = f"{row['entries']:,} entries", 0.8 if row["entries"] >= LONG else 1.02
    tokens = goal(f"{name}, routed / token only, {where}", row["step_vs_token_only"][0], bound)
    return {**row, "goals": [tokens, goal(f"{name}, same bytes, {where}", row["step_vs_same_bytes"][0], 1.05)]}


def decoding(given: Settings, entries: int) -> dict[str, Any]:
    """A decoding step as it is called, and one layer's attention."""
    return _step_goals("step", decode.measure(_decoder(given), entries, given.sizes.pairs))


def graphs(given: Settings, entries: int) -> dict[str, Any]:
    """The same step replayed from a CUDA graph, and eight rows in one."""
    row = _step_goals("step in a graph", compared_steps(_decoder(given), entries, given.sizes.pairs))
    row["goals"].append(goal(f"step in a graph, eight rows / one, {entries:,} entries", row["eight_rows_vs_one"][0], 4))
    return row


def formats(given: Settings, entries: int) -> dict[str, Any]:
    """Captured steps on rounded entries."""
    row = stored_steps(_decoder(given), entries, given.sizes.pairs)
    what = f"step in a graph, {entries:,} entries,"
    return {**row, "goals": [goal(f"{what} {name} / model", each[0], 1.1) for name, each in row["ratios"].items()]}


def packing(given: Settings, length: int) -> dict[str, Any]:
    """Packing a prompt's layers in one launch each."""
    row = packed_prompts(given.device, given.dtype, length, given.sizes.layers, given.sizes.pairs)
    what = f"packing {length:,} tokens, one launch a layer / operations"
    return {**row, "goals": [goal(what, row["ratio"][0], 0.5)]}


def prompts(given: Settings, length: int, times: int = 1) -> dict[str, Any]:
    """A prompt's pass with routers, or with statistics, plan and packing, over the plain one."""
    sizes, methods = given.sizes, list(prefill.WINDOWED)
    config = llama_config(sizes.layers, length, vocabulary=64, times=times)
    row = prefill.measure(config, length, sizes.pairs, methods, given.device, given.dtype)
    tokens = f"{length:,} tokens"
    held = row["ratios"] if length >= LONG else {name: row["ratios"][name] for name in ("routed", "unrouted")}
    goals = [goal(f"pass, {name}, {tokens}", figures[0], 1.03) for name, figures in held.items()]
    # a scout's own: the keys of one more layer, a tenth of it
    bounds = {"routed / unrouted": 1.03, "scout / its layers": 1.05}
    goals += [goal(f"pass, {what}, {tokens}", row["beside"][what][0], bound) for what, bound in bounds.items()]
    return {**row, "goals": goals}


def training(given: Settings, name: str) -> dict[str, Any]:
    """A training step, routed over unrouted."""
    case = given.sizes.cases[name]
    makes = sides(case, given.device, given.dtype)
    compared, pairs = {side: makes[side] for side in ("routed", "unrouted")}, given.sizes.training_pairs
    seconds = timed(compared, pairs, time.perf_counter)
    figures = ratio(seconds, "routed", "unrouted")
    goals = [goal(f"training step, {case.text}, routed / unrouted", figures[0], 1.03)]
    return {"case": case.text, "warmup": WARMUP, "seconds": seconds, "step_ratio": figures, "goals": goals}


def predicted(case: Case, device: str, dtype: torch.dtype, routed: bool) -> MemoryEstimate:
    """What ``subtoken-train check`` would say of a case's step; nothing is loaded."""
    parts, _ = assemble(case.family("meta", dtype), case.lora, case.reducer, case.routing if routed else None)
    record = case.records(1)[0]
    pixels = record.pixel_values
    step = Step(
        batch_size=case.batch_size, length=record.input_ids_BN.shape[1], compressed=case.compressed,
        labelled=int((record.labels_BN >= 0).sum()), pixel_bytes=0 if pixels is None else pixels.nbytes,
        autocast=dtype != torch.float32, dropout=False, on_cpu=not device.startswith("cuda"),
    )  # fmt: skip
    return estimate_memory(parts, step)


def memory(given: Settings, name: str) -> dict[str, Any]:
    """Predicted peaks of training steps beside measured ones; a GPU's allocator rounds up, which is not predicted."""
    case, rows, goals = given.sizes.cases[name], {}, []
    makes = sides(case, given.device, given.dtype)
    for side in ("routed", "unrouted"):
        estimate = predicted(case, given.device, given.dtype, side == "routed")
        peak = peak_bytes(makes[side], given.device)
        error = estimate.total / peak - 1
        rows[side] = {"predicted": estimate.total, "parts": dict(estimate.parts), "measured": peak, "error": error}
        goals.append(goal(f"memory, {case.text}, {side}: prediction off by", abs(error), 0.1))
    return {"case": case.text, "sides": rows, "goals": goals}


def _benchmark(given: Settings, *words: str) -> dict[str, Any]:
    """The record of ``subtoken-train benchmark``, which is refused by exit code and a line on stderr."""
    with tempfile.TemporaryDirectory() as folder:
        out, said = Path(folder) / "record.json", StringIO()
        with redirect_stderr(said):
            code = command(["benchmark", *words, "--random", "--device", given.device, "--out", str(out)])
        if code:
            raise RuntimeError(f"subtoken-train benchmark ended with exit code {code}: {said.getvalue()}")
        record: dict[str, Any] = json.loads(out.read_text())
    return record


def answers(given: Settings, words: str) -> dict[str, Any]:
    """An answer's captured steps on all of a prompt's entries, over transformers' caches."""
    (model, *options), goals = words.split(), []
    record = _benchmark(given, "--model", model, *options)
    for row in record["rows"]:
        step, length = row["ratios"]["step"], row["prompt"]["length"]
        for side, bound in (("static", 1.1), ("dynamic", 0.5 if length >= LONG else 1.0)):
            goals.append(goal(f"answer, {model}, {length:,} tokens, step / {side}", step[side][0], bound))
    return {**record, "goals": goals}


def table8(given: Settings, arm: str) -> dict[str, Any]:
    """A row of the paper's Table 8."""
    reducer, ratio = arm.split()
    with patch.multiple(paper_protocols, REDUCERS=(reducer,), KEEP_RATIOS=(float(ratio),)):
        record = _benchmark(given, "--table8", "--model", *given.sizes.protocol)
    goals = []
    for row in record["rows"]:
        for part, bound in (("prefill", 1.03), ("step", 1.02)):
            what = f"Table 8, {row['table8']}: {part}, routed / token only at equal tokens"
            goals.append(goal(what, row["ratios"][part][TOKEN_ONLY][0], bound))
    return {**record, "goals": goals}


def units(sizes: Sizes) -> dict[str, Unit]:
    """Name -> unit, in the order in which they run: what was never timed comes first."""
    kinds: dict[str, tuple[Callable[[Settings, Any], dict[str, Any]], Any]] = {
        "answer": (answers, sizes.answers), "pack": (packing, sizes.prompts), "format": (formats, sizes.formats),
        "table8": (table8, sizes.rows), "prefill": (prompts, sizes.prompts),
        "wide prefill": (partial(prompts, times=4), sizes.prompts), "training": (training, sizes.cases),
        "memory": (memory, sizes.cases), "graph": (graphs, sizes.decode), "decode": (decoding, sizes.decode),
    }  # fmt: skip
    made: dict[str, Unit] = {"tests": gpu_tests}
    for kind, (measure, each) in kinds.items():
        made |= {f"{kind}/{size}": lambda given, m=measure, s=size: m(given, s) for size in each}
    return made
