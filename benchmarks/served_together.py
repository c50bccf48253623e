"""Seconds of requests that wait together at a server: in one pass, and one after another.

    python -m benchmarks.served_together --backbone checkpoints/smollm2

One model stands behind two answerers, of ``--batch 8`` and ``--batch 1``. Eight requests come at once, of 32 tokens
each, and are timed until the last answer's end, in turns: prompts of which every one is compressed by knorm to a
quarter, and questions about one text that KVzip has compressed to a quarter.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.pages import put
from benchmarks.pairs import cell, hardware, interleaved, ratio, write
from subtoken_train.inference.arm_spec import ArmSpec
from subtoken_train.serving.answerer import Answerer
from subtoken_train.serving.chat_request import Limits, read_request
from subtoken_train.serving.context_store import ContextStore
from subtoken_train.serving.line import Answer, Event, Job

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/serving.md"
RESULT = ROOT / "benchmarks/results/speed/served_together.json"
TOGETHER, NEW, ROUNDS = 8, 32, 7
SUBJECTS = ("a list", "a class", "an exception", "a module", "a file", "a loop", "a string", "a test")
CASES = {"prompts": ("knorm", 0.25), "questions about one text": ("kvzip", 0.25)}


def bodies(case: str, text: str) -> list[dict[str, Any]]:
    """Return eight requests."""
    words = text.split()
    found = []
    for place, subject in enumerate(SUBJECTS):
        question = f"\n\nWhat is {subject}?"
        if case == "prompts":
            content: Any = " ".join(words[40 * place : 40 * place + 140]) + question
        else:
            marked = {"type": "text", "text": " ".join(words[:600]), "cache_control": {"type": "ephemeral"}}
            content = [marked, {"type": "text", "text": question}]
        found.append({"model": "", "max_tokens": NEW, "messages": [{"role": "user", "content": content}]})
    return found


def answers(answerer: Answerer, requests: list[dict[str, Any]]) -> list[tuple[str, int]]:
    """Return texts and prompt tokens of requests that come at once."""
    told: list[list[Event]] = [[] for _ in requests]
    left, done = [len(requests)], threading.Event()

    def hearer(place: int) -> Callable[[Event], None]:
        def hear(event: Event) -> None:
            told[place].append(event)
            left[0] -= not isinstance(event, str)
            if not left[0]:
                done.set()

        return hear

    for place, body in enumerate(requests):
        request = read_request(json.dumps(body).encode(), answerer.limits)
        answerer.submit(Job(request, hearer(place), time.monotonic() + 3600))
    done.wait()
    found = []
    for *pieces, end in told:
        if not isinstance(end, Answer):
            raise RuntimeError(f"a request was refused: {end}")
        found.append(("".join(map(str, pieces)), end.prompt_tokens))
    return found


def measured(backbone: str, text: str, rounds: int) -> dict[str, Any]:
    """Time both ways in turns."""
    spec, rows = ArmSpec(backbone=backbone), []
    model = spec.load("cpu")
    for case, (eviction, keep) in CASES.items():
        own = replace(spec, eviction=eviction, eviction_keep=keep)
        around = type(model).around(model.backbone, own.compression(model.compression.round_up))
        sides = {
            name: Answerer(around, own, Limits(NEW, batch=batch), ContextStore(10**9))
            for name, batch in (("together", TOGETHER), ("one after another", 1))
        }
        requests = bodies(case, text)
        said = {name: answers(side, requests) for name, side in sides.items()}
        actions = {name: partial(answers, side, requests) for name, side in sides.items()}
        seconds = interleaved(actions, rounds, warmup=0)  # the first answers were it
        for side in sides.values():
            side.close()
        together, apart = said.values()
        rows.append(
            {
                "case": case,
                "eviction": f"{eviction} {keep:.0%}",
                "prompt_tokens": sum(tokens for _, tokens in together) // TOGETHER,
                "same_answers": sum(one == other for one, other in zip(together, apart, strict=True)),
                "seconds": seconds,
                "ratio": ratio(seconds, "together", "one after another"),
            }
        )
        print(rows[-1]["case"], rows[-1]["same_answers"], cell(rows[-1]["ratio"]), flush=True)
    return {
        "backbone": Path(backbone).name,
        "dtype": str(next(model.backbone.model.parameters()).dtype)[6:],
        "rows": rows,
    }


def table(record: dict[str, Any]) -> str:
    """A row per case."""
    lines = [
        "| eight requests at once | prompt | one after another | together | ratio | same answers |",
        "|---|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        apart, together = (sorted(row["seconds"][name]) for name in ("one after another", "together"))
        middle = len(apart) // 2
        lines.append(
            f"| {row['case']}, {row['eviction']} | {row['prompt_tokens']:,} tokens | {apart[middle]:.1f} s | "
            f"{together[middle]:.1f} s | {cell(row['ratio'])} | {row['same_answers']} of {TOGETHER} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", default="checkpoints/smollm2")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    args = parser.parse_args()
    text = (ROOT / "data/samples/reference.txt").read_text(encoding="utf-8")
    record = {**measured(args.backbone, text, args.rounds), "hardware": hardware()}
    write(record, RESULT)
    put(PAGE, "served", table(record))


if __name__ == "__main__":
    main()
