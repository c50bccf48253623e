"""Recall of a context that is compressed before any question is seen: our evictions beside kvpress's own presses.

    python -m venv /tmp/kvpress && /tmp/kvpress/bin/pip install kvpress==0.5.4 transformers==5.2.0   # apart from ours
    export OMP_NUM_THREADS=1
    python benchmarks/recall_peers.py draw /tmp/recall                   # the contexts, as token ids
    /tmp/kvpress/bin/python benchmarks/recall_kvpress.py /tmp/recall     # imports kvpress, and nothing of this package
    python benchmarks/recall_peers.py ours /tmp/recall                   # ... and benchmarks/results/recall_peers.json
    python benchmarks/recall_peers.py table                              # the page's table from the record

Sixty contexts of 512 tokens of the held-out split, 24 facts in each, eight asked for, read by the bare
``checkpoints/tiny-llama``. Both sides get the same ids, compress the context alone, then read the question at the
positions after the whole context and answer greedily; a hit is a code that is stated exactly. Compactor draws a random
sketch: both sides run five, and a context's hits are their mean. What one side has answered is kept in the folder, a
file per method, and not run again.
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

from benchmarks.pages import put
from benchmarks.pairs import hardware, write
from benchmarks.recall_sets import compare_sets
from subtoken_train.datasets.recall import RecallRecords, RecallTask, recall_accuracy
from subtoken_train.datasets.text_batches import TextSample, collate_text
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.evaluation.intervals import bootstrap_interval
from subtoken_train.evictions import build_eviction
from subtoken_train.inference.batched import generate_batch
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.pool import load_backbone
from subtoken_train.types import Batch

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "checkpoints/tiny-llama"
RECORD, PAGE = ROOT / "benchmarks/results/recall_peers.json", ROOT / "docs/quality/recall.md"
CONTEXTS, SEED = 60, 0
KEPT = (0.5, 0.25, 0.125)
BATCH = 15
SKETCHES = range(5)
OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "expected_attention": ("expected_attention", {}),
    "keydiff": ("keydiff", {}),
    "compactor": ("compactor", {}),
    "compactor, kvpress": ("compactor", {"scaled": False, "masked": False}),
    "tova": ("tova", {}),
    "tova, kvpress": ("tova", {"protect_last": True}),
    "snapkv": ("snapkv", {}),
    "knorm": ("knorm", {}),
    "lagkv": ("lagkv", {}),
    "kvcompose": ("kvcompose", {}),
    "kvcompose, kvpress": ("kvcompose", {"kvpress": True}),
    "kvcompose, causal": ("kvcompose", {"task": "causal"}),
    "kvzip, chunks of 256": ("kvzip", {"chunk": 256}),
    "kvzip, kvpress": ("kvzip", {"chunk": 256, "lower_bound": 0}),
    "ada(expected_attention)": ("ada(expected_attention)", {"epsilon": 1e-2}),
    "ada(snapkv)": ("ada(snapkv)", {}),
}
"""Name in the tables -> (method, settings); a new one is a line here, and its peer one in ``PAIRS``."""
PAIRS = [
    ("expected_attention", "ExpectedAttention"),
    ("keydiff", "KeyDiff"),
    ("compactor", "Compactor"),
    ("compactor, kvpress", "Compactor"),
    ("tova, kvpress", "TOVA"),
    ("tova", "TOVA"),
    ("snapkv", "SnapKV"),
    ("knorm", "Knorm"),
    ("lagkv", "LagKV"),
    ("kvcompose, kvpress", "KVCompose"),
    ("kvcompose", "KVCompose"),
    ("kvcompose, causal", "KVCompose"),
    ("kvzip, chunks of 256", "KVzip"),
    ("kvzip, kvpress", "KVzip, chunks of 256"),
    ("ada(expected_attention)", "AdaKV(ExpectedAttention)"),
    ("ada(snapkv)", "AdaKV(SnapKV)"),
]
"""Ours and theirs, compared question by question."""
SAME_SETS = (
    "expected_attention", "keydiff", "tova, kvpress", "snapkv", "knorm", "lagkv", "kvcompose, kvpress",
    "kvzip, kvpress", "ada(expected_attention)", "ada(snapkv)",
)  # fmt: skip
"""Ours that are to keep the very entries of their pair."""


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
    backbone, samples = load_backbone(MODEL), drawn["samples"]
    peers = dict.fromkeys(["none", *(theirs for _, theirs in PAIRS)])
    theirs = {name: torch.load(folder / f"{name}.pt") for name in peers}

    def hits(draws: list[list[str]]) -> list[float]:
        """Hits in every context, mean over draws."""
        counts = [
            [round(len(sample["codes"]) * recall_accuracy(text, sample["codes"])) for text in texts]
            for sample, *texts in zip(samples, *draws, strict=True)
        ]
        return [sum(each) / len(each) for each in counts]

    rows: dict[str, dict[str, list[float]]] = {}
    decode = backbone.family.tokenizer.batch_decode
    for name, found in theirs.items():
        texts = {
            kept: [decode(ids, skip_special_tokens=True) for ids in draws] for kept, draws in found["answers"].items()
        }
        rows[f"kvpress {name}"] = {kept: hits(draws) for kept, draws in texts.items()}
    for name in ("none", *OURS):
        rows[f"ours {name}"] = {kept: hits(draws) for kept, draws in _answers(backbone, drawn, name, folder).items()}
    asked = [len(sample["codes"]) for sample in samples]
    pairs = dict(PAIRS)
    record = {
        "contexts": CONTEXTS,
        "seed": SEED,
        "context_tokens": len(samples[0]["context"]),
        "asked": asked,
        "kept": list(KEPT),
        "versions": {
            "kvpress's side": theirs["none"]["versions"],
            "ours": {x: version(x) for x in ("transformers", "torch")},
        },
        "hardware": hardware(),
        "python": platform.python_version(),
        "hits": rows,
        "paired": [_paired(rows, asked, *pair) for pair in PAIRS],
        "kept_sets": {
            name: compare_sets(
                [_batch(samples[i : i + BATCH]) for i in range(0, CONTEXTS, BATCH)],
                backbone,
                build_eviction(OURS[name][0], **OURS[name][1]),
                theirs[pairs[name]]["sets"],
            )
            for name in SAME_SETS
        },
    }
    write(record, RECORD)


def _answers(
    backbone: CompressedBackbone, drawn: dict[str, Any], name: str, folder: Path
) -> dict[str, list[list[str]]]:
    """Our answers at each share, draw by draw; from the folder, if they are there."""
    file = folder / f"ours {name}.json"
    if file.exists():
        found: dict[str, list[list[str]]] = json.loads(file.read_text())
        return found
    method, options = OURS.get(name, ("", {}))
    found = {}
    for kept in KEPT if method else (1.0,):
        found[str(kept)] = []
        for seed in SKETCHES if method == "compactor" else (None,):
            settings = options if seed is None else {**options, "seed": seed}
            compression = Compression(build_eviction(method, **settings), kept) if method else Compression()
            texts: list[str] = []
            for start in range(0, CONTEXTS, BATCH):
                batch = _batch(drawn["samples"][start : start + BATCH])
                most = drawn["max_new_tokens"]
                said = generate_batch(
                    backbone, batch, max_new_tokens=most, compression=compression, protocol="context_first"
                )
                texts += [each.text for each in said]
            found[str(kept)].append(texts)
        print(name, kept, flush=True)
    file.write_text(json.dumps(found))
    return found


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
        made = table(json.loads(RECORD.read_text(encoding="utf-8")))
        put(PAGE, "recall_peers", made)


if __name__ == "__main__":
    main()
