"""Recall of a context that is compressed before any question is seen: our evictions beside kvpress's own presses.

    python -m venv /tmp/kvpress && /tmp/kvpress/bin/pip install kvpress==0.5.4 transformers==5.2.0   # apart from ours
    export OMP_NUM_THREADS=1
    python benchmarks/recall_peers.py draw /tmp/recall                   # the contexts, as token ids
    /tmp/kvpress/bin/python benchmarks/recall_kvpress.py /tmp/recall     # imports kvpress, and nothing of this package
    python benchmarks/recall_peers.py ours /tmp/recall                   # ... and benchmarks/results/recall_peers.json
    python benchmarks/recall_peers.py table                              # the page's table from the record

Sixty contexts of 512 tokens of the held-out split, 24 facts in each, eight asked for, read by the bare
``checkpoints/tiny-llama``. Both sides get the same ids, compress the context alone, then read the question at the
positions after the whole context and answer greedily; a hit is a code that is stated exactly.
"""

from __future__ import annotations

import argparse
import json
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from benchmarks.pairs import hardware, write
from subtoken_train.cache.cache import PackedCache
from subtoken_train.datasets.recall import RecallRecords, RecallTask, recall_accuracy
from subtoken_train.datasets.text_batches import TextSample, collate_text
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.evaluation.intervals import bootstrap_interval
from subtoken_train.evictions import build_eviction
from subtoken_train.inference.batched import generate_batch
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.opening import open_prompts
from subtoken_train.inference.pool import load_backbone
from subtoken_train.types import Batch

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "checkpoints/tiny-llama"
RECORD, PAGE = ROOT / "benchmarks/results/recall_peers.json", ROOT / "benchmarks/README.md"
START, END = "<!-- recall_peers:start -->", "<!-- recall_peers:end -->"
CONTEXTS, SEED = 60, 0
KEPT = (0.5, 0.25, 0.125)
BATCH = 15
OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "kvcompose": ("kvcompose", {}),
    "kvcompose, kvpress": ("kvcompose", {"kvpress": True}),
    "kvcompose, causal": ("kvcompose", {"task": "causal"}),
    "snapkv": ("snapkv", {}),
}
PAIRS = [
    ("kvcompose, kvpress", "KVCompose"),
    ("kvcompose", "KVCompose"),
    ("kvcompose, causal", "KVCompose"),
    ("snapkv", "SnapKV"),
]
"""Ours and theirs, compared question by question."""


def draw(folder: Path) -> None:
    """Write the contexts: ids of each with its question, the codes asked for, and the longest answer's tokens."""
    records = RecallRecords(RecallTask(AutoTokenizer.from_pretrained(MODEL)), "test", CONTEXTS, SEED)
    drawn = [records[i] for i in range(CONTEXTS)]
    samples = []
    for sample in drawn:
        ids, text = [int(token) for token in sample.text.input_ids], sample.text
        split = text.context_length, text.prompt_length
        samples.append({"context": ids[: split[0]], "question": ids[split[0] : split[1]], "codes": sample.codes})
    longest = max(len(sample.text.input_ids) - sample.text.prompt_length for sample in drawn)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "contexts.json").write_text(json.dumps({"samples": samples, "max_new_tokens": longest + 4}))


@torch.no_grad()
def ours(folder: Path) -> None:
    """Run our evictions on the same contexts, score both sides, compare the kept sets, and write the record."""
    drawn = json.loads((folder / "contexts.json").read_text())
    theirs = json.loads((folder / "peers.json").read_text())
    backbone = load_backbone(MODEL)
    tokenizer, samples = backbone.family.tokenizer, drawn["samples"]

    def hits(texts: list[str]) -> list[int]:
        return [
            round(len(sample["codes"]) * recall_accuracy(text, sample["codes"]))
            for text, sample in zip(texts, samples, strict=True)
        ]

    rows: dict[str, dict[str, list[int]]] = {}
    for name, fractions in theirs["answers"].items():
        rows[f"kvpress {name}"] = {
            kept: hits(tokenizer.batch_decode(ids, skip_special_tokens=True)) for kept, ids in fractions.items()
        }
    for name, (method, options) in {"none": ("", {}), **OURS}.items():
        rows[f"ours {name}"] = {}
        for kept in KEPT if method else (1.0,):
            compression = Compression(build_eviction(method, **options), kept) if method else Compression()
            texts: list[str] = []
            for start in range(0, CONTEXTS, BATCH):
                batch = _batch(samples[start : start + BATCH])
                found = generate_batch(
                    backbone,
                    batch,
                    max_new_tokens=drawn["max_new_tokens"],
                    compression=compression,
                    protocol="context_first",
                )
                texts += [each.text for each in found]
            rows[f"ours {name}"][str(kept)] = hits(texts)
            print(name, kept, flush=True)
    asked = [len(sample["codes"]) for sample in samples]
    record = {
        "contexts": CONTEXTS,
        "seed": SEED,
        "context_tokens": len(samples[0]["context"]),
        "asked": asked,
        "kept": list(KEPT),
        "versions": {"kvpress's side": theirs["versions"], "ours": {x: version(x) for x in ("transformers", "torch")}},
        "hardware": hardware(),
        "python": platform.python_version(),
        "hits": rows,
        "paired": [_paired(rows, asked, *pair) for pair in PAIRS],
        "kept_sets": _kept_sets(backbone, samples, torch.load(folder / "kvcompose.pt")),
    }
    write(record, RECORD)


def _batch(samples: list[dict[str, Any]]) -> Batch:
    return collate_text(
        [
            TextSample([*x["context"], *x["question"]], len(x["context"]), len(x["question"]), f"recall {i}")
            for i, x in enumerate(samples)
        ],
        pad_id=0,
    )


def _paired(rows: dict[str, Any], asked: list[int], first: str, second: str) -> dict[str, Any]:
    """Differences in % of the facts asked for, ours less theirs, with 95 % intervals over contexts."""
    found: dict[str, Any] = {"ours": first, "kvpress": second}
    for kept in map(str, KEPT):
        pairs = zip(rows[f"ours {first}"][kept], rows[f"kvpress {second}"][kept], asked, strict=True)
        values = [100 * (a - b) / count for a, b, count in pairs]
        found[kept] = [sum(values) / len(values), *bootstrap_interval(values)]
    return found


def _kept_sets(
    backbone: CompressedBackbone, samples: list[dict[str, Any]], noted: dict[str, list[Any]]
) -> dict[str, Any]:
    """Our kept sets beside the release's, entry by entry: sets that are equal, entries that differ, and by how much.

    The release gives the first layer, rank by rank, the best of any layer's scores: its values are then just those of
    other layers, and which of two equal ones is the last within the budget is not defined by its ``topk``. One layer
    then keeps an entry per head more and another one less. ``widest`` is the largest distance, in the release's scores,
    of an entry that one side alone keeps from the worst that the release keeps in that head.
    """
    found: dict[str, Any] = {}
    for kept in KEPT:
        equal = differing = entries = 0
        widest = 0.0
        for start in range(0, CONTEXTS, BATCH):
            compression = Compression(build_eviction("kvcompose", kvpress=True), kept)
            cache = PackedCache(backbone.family.shape.num_layers)
            batch = _batch(samples[start : start + BATCH])
            plan = open_prompts(backbone, batch, cache, compression, "context_first").plan
            for row, (scores, theirs) in enumerate(noted[str(kept)][start : start + BATCH]):
                mine = torch.zeros_like(theirs)
                for layer, part in enumerate(plan.layers):
                    real = part.entries_BN[row] >= 0
                    mine[layer][:, part.entries_BN[row, real]] = part.heads_BNh[row, real].T
                apart = mine ^ theirs
                equal, differing, entries = (
                    equal + (not apart.any()),
                    differing + int(apart.sum()),
                    entries + int(theirs.sum()),
                )
                worst = scores.masked_fill(~theirs, torch.inf).amin(-1, keepdim=True)
                widest = max(widest, float((scores - worst).abs().masked_fill(~apart, 0).max()))
        found[str(kept)] = {
            "contexts_equal": equal,
            "entries_kept": entries,
            "entries_that_one_side_keeps": differing,
            "widest": widest,
        }
    return found


def table(record: dict[str, Any]) -> str:
    """Recall in %, and the paired differences."""
    total = sum(record["asked"])
    lines = ["| method | " + " | ".join(f"{kept:.1%} kept" for kept in record["kept"]) + " |"]
    lines.append("|---" * (len(record["kept"]) + 1) + "|")
    for name, fractions in record["hits"].items():
        cells = [f"{100 * sum(hits) / total:.1f}" for hits in fractions.values()]
        cells = cells * len(record["kept"]) if len(cells) == 1 else cells
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", "| ours less kvpress's | " + " | ".join(f"{kept:.1%} kept" for kept in record["kept"]) + " |"]
    lines.append("|---" * (len(record["kept"]) + 1) + "|")
    for pair in record["paired"]:
        cells = ["{:+.1f} [{:+.1f}, {:+.1f}]".format(*pair[str(kept)]) for kept in record["kept"]]
        lines.append(f"| {pair['ours']} - {pair['kvpress']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["draw", "ours", "table"])
    parser.add_argument("folder", nargs="?", type=Path, help="what passes between the parts (not for table)")
    args = parser.parse_args()
    if args.part != "table":
        if args.folder is None:
            parser.error(f"{args.part} needs a folder")
        {"draw": draw, "ours": ours}[args.part](args.folder)
    if args.part in ("ours", "table"):
        before, rest = PAGE.read_text(encoding="utf-8").split(START + "\n")
        made = table(json.loads(RECORD.read_text(encoding="utf-8")))
        PAGE.write_text(f"{before}{START}\n{made}\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
