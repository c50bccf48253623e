"""What a training step costs: routed against unrouted LoRA, and our fit against plain peft + transformers' Trainer.

    OMP_NUM_THREADS=1 python benchmarks/training_cost.py                                       # CPU, fp32
    CUDA_VISIBLE_DEVICES=0 python benchmarks/training_cost.py --device cuda --dtype bfloat16 --cases llava-7b llama-7b

*routed / unrouted*: a step (data, forward, backward, clipping, AdamW, logging) of the same fit with and without
routers, on the same records behind the same token reducer. *ours / plain*: tokens per second of our fit, without
reducer and routers, over those of transformers' Trainer: same model, peft LoRA, records, batch, dtype, AdamW, clipping
and logging interval; no progress bar on either side, and no log files on theirs.

The pairing is fair because both sides are whole training loops that live in one process and take one step each in
turn, in an order that alternates (``training_arms.py``): a slow moment of the machine hits both. A step lasts from one
handing-over to the next, so whatever a loop does between two steps is in it. On a CPU it is measured in seconds of the
processor, of which a step that nothing interrupts takes as many as of the clock (one thread, nothing waits for a disk),
so that other programs on the machine do not count; on a GPU in seconds of the clock.

*memory*: the most that all tensors together, weights included, take at any moment of a fit of two steps, so that
gradients, moments and activations meet: ``LiveTensors`` on a CPU, with the backbone in fp32 and in bf16 (mixed
precision); on a GPU the allocator's peak, in the dtype that is timed.
"""

import argparse
import gc
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.pairs import cell, hardware, interleaved, markdown, ratio, write
from benchmarks.training_arms import Loop, Turns, our_fit, plain_trainer
from benchmarks.training_cases import CASES, UNREDUCED, Case
from subtoken_train.benchmarking.rounds import LiveTensors
from subtoken_train.cli.terminal import quiet_libraries

ROOT = Path(__file__).resolve().parents[1]
WARMUP = 3
KINDS = ("float32", "bfloat16")
ON_CPU = ("llava-reduced", "llama-quest", "tiny-llava")
Make = Callable[[int], Loop]
"""Makes a side for so many steps."""


def sides(case: Case, device: str, dtype: torch.dtype) -> dict[str, Make]:
    """The four training loops of a case."""
    return {
        "routed": lambda steps: our_fit(case, case.reducer, case.routing, steps, device, dtype),
        "unrouted": lambda steps: our_fit(case, case.reducer, None, steps, device, dtype),
        "ours": lambda steps: our_fit(case, UNREDUCED, None, steps, device, dtype),
        "plain": lambda steps: plain_trainer(case, steps, device, dtype),
    }


def timed(makes: dict[str, Make], pairs: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Seconds of the steps of loops that take turns."""
    turns = {name: Turns(make(WARMUP + pairs)) for name, make in makes.items()}
    seconds = interleaved({name: turn.advance for name, turn in turns.items()}, pairs, WARMUP, clock)
    for turn in turns.values():
        turn.finish()
    return seconds


def peak_bytes(make: Make, device: str) -> int:
    """The most bytes of tensors at any moment while a loop is made and takes two steps."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        make(2)(lambda: None)
        return torch.cuda.max_memory_allocated() - before
    with LiveTensors() as tensors:
        make(2)(lambda: None)
    return tensors.peak


def peaks(case: Case, device: str, dtype: torch.dtype) -> dict[str, dict[str, int]]:
    """Per dtype of the backbone the peak of the routed and of the unrouted side, in bytes."""
    dtypes = [dtype] if device.startswith("cuda") else [getattr(torch, kind) for kind in KINDS]
    return {
        str(kind).removeprefix("torch."): {
            side: peak_bytes(sides(case, device, kind)[side], device) for side in ("routed", "unrouted")
        }
        for kind in dtypes
    }


def measure(name: str, pairs: int, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """One row."""
    case = CASES[name]
    clock = time.perf_counter if device.startswith("cuda") else time.process_time
    makes, load = sides(case, device, dtype), os.getloadavg()[0]
    held = peaks(case, device, dtype)
    routing = timed({side: makes[side] for side in ("routed", "unrouted")}, pairs, clock)
    gc.collect()
    plain = timed({side: makes[side] for side in ("ours", "plain")}, pairs, clock)
    seconds = {side: float(np.median(values)) for side, values in {**routing, **plain}.items()}
    tokens = case.batch_size * case.records(1)[0].input_ids_BN.shape[1]
    return {
        "case": name, "text": case.text, "batch_size": case.batch_size, "pairs": pairs,
        "load": [load, os.getloadavg()[0]], "seconds": seconds,
        "tokens_per_second": {side: tokens / seconds[side] for side in ("ours", "plain")}, "peak_bytes": held,
        "step_ratio": ratio(routing, "routed", "unrouted"),
        "memory_ratio": {kind: peak["routed"] / peak["unrouted"] for kind, peak in held.items()},
        "tokens_ratio": ratio(plain, "plain", "ours"),
    }  # fmt: skip


def table(record: dict[str, Any]) -> str:
    """Make the table of ``docs/speed.md``."""
    memory = [f"memory, {kind}" for kind in KINDS]
    head = ["case", "unrouted step", "routed / unrouted", *memory, "plain", "ours / plain"]
    rows = []
    for row in record["rows"]:
        about = [f"{row['text']}, batch {row['batch_size']}", f"{row['seconds']['unrouted']:.2f} s"]
        told = [cell(tuple(row["step_ratio"])), *(_memory(row, kind) for kind in KINDS)]
        plain = f"{row['tokens_per_second']['plain']:,.0f} tokens/s"
        rows.append([*about, *told, plain, cell(tuple(row["tokens_ratio"]))])
    return markdown(head, rows)


def _memory(row: dict[str, Any], kind: str) -> str:
    if kind not in row["peak_bytes"]:
        return ""
    return f"{row['peak_bytes'][kind]['unrouted'] / 2**20:,.0f} MiB x {row['memory_ratio'][kind]:.3f}"


def merged(path: Path, record: dict[str, Any]) -> dict[str, Any]:
    """A record with the rows of the file at ``path`` that it does not measure anew, in the order of the cases."""
    rows = {row["case"]: row for row in json.loads(path.read_text())["rows"]} if path.exists() else {}
    rows |= {row["case"]: row for row in record["rows"]}
    return {**record, "rows": [rows[name] for name in CASES if name in rows]}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--cases", nargs="+", default=list(ON_CPU), choices=list(CASES))
    parser.add_argument("--pairs", type=int, default=30)
    args = parser.parse_args()
    quiet_libraries()
    path = ROOT / f"benchmarks/results/speed/training-{args.device.split(':')[0]}-{args.dtype}.json"
    for name in args.cases:
        row = measure(name, args.pairs, args.device, getattr(torch, args.dtype))
        record = merged(path, {"hardware": hardware(), "dtype": args.dtype, "rows": [row]})
        write(record, path)
        print(table({"rows": [row]}).splitlines()[-1], flush=True)
    print(table(record))


if __name__ == "__main__":
    main()
