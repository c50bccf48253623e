"""Our evictions beside kvpress's presses on real weights: the same scores, the same entries?

    python -m venv /tmp/kvpress && /tmp/kvpress/bin/pip install kvpress==0.5.4 transformers==5.2.0   # apart from ours
    python -m benchmarks.real_peers --model checkpoints/smollm2 --source DIR --kvpress /tmp/kvpress/bin/python
                                                                               # rows that the record lacks
    python -m benchmarks.real_peers --table                                    # the page's table from the record

DIR holds WikiText-2's ``test.txt``. The contexts are ``real_text.py``'s: some 700 tokens, facts among them, as ids that
both sides read in fp32 and compress before any question. Both keep the same number of entries. Scores are compared on
entries that neither side keeps in any case, each side's divided by the largest of its head: that a method sums rows
where the press takes their mean is no difference. What kvpress decided is kept in --folder, and not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.arm_training import sha256
from benchmarks.real_text import ENTRIES, contexts
from benchmarks.workers import ROOT
from subtoken_train.cache.cache import PackedCache
from subtoken_train.engine.attention import reading_packed
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.evictions import build_eviction
from subtoken_train.evictions.base import Eviction
from subtoken_train.evictions.thresholds import Threshold
from subtoken_train.families.family import Family
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.eviction_pass import EvictionPass
from subtoken_train.inference.layer_packer import LayerPacker
from subtoken_train.inference.pool import load_backbone
from subtoken_train.inference.prefill import contexts_of, run_whole
from subtoken_train.inference.text_prompts import EncodedText, text_batch, text_frame, text_ids

RECORD, PAGE = ROOT / "benchmarks/results/real_peers.json", ROOT / "docs/quality/real_weights.md"
START, END = "<!-- real_peers:start -->", "<!-- real_peers:end -->"
CONTEXTS, ASKED = 2, 16
TIE = 1e-5
"""Scores that are no further apart, in shares of the head's largest, are taken for equal."""


@dataclass(frozen=True)
class Pair:
    """One of our settings beside a press.

    Attributes:
        words: ours, in the table.
        notation: of our method.
        press: its name in ``real_kvpress.py``.
        options: settings that differ from the method's own.
        framed: whether the context stands in the chat template.
        scored: whether a score of one side means what the other's does.
        asks: whether the last ``ASKED`` tokens of a context stand for a question, which stays.
        threshold: whether the shares that stay are thresholds on both sides.
    """

    words: str
    notation: str
    press: str
    options: dict[str, Any]
    framed: bool = False
    scored: bool = True
    asks: bool = False
    threshold: bool = False


MEAN_ROWS = {"snapkv.rows": "mean"}
PAIRS = [
    Pair("knorm", "knorm", "Knorm", {}),
    Pair("keydiff", "keydiff", "KeyDiff", {}),
    Pair("streaming_llm", "streaming_llm", "StreamingLLM", {}, scored=False),
    Pair("snapkv", "snapkv", "SnapKV", {}),
    Pair("tova", "tova", "TOVA", {}),
    Pair("tova, the last entry stays", "tova", "TOVA", {"protect_last": True}),
    Pair("lagkv", "lagkv", "LagKV", {}),
    Pair("expected_attention", "expected_attention", "ExpectedAttention", {}),
    Pair("compactor", "compactor", "Compactor", {}),
    Pair("compactor, last chunk filled up", "compactor", "Compactor", {"masked": False}),
    Pair("compactor, filled up, another sketch", "compactor", "Compactor", {"masked": False, "seed": 1}),
    Pair("h2o", "h2o", "ObservedAttention", {}),
    Pair("h2o, means, no recent half", "h2o", "ObservedAttention", {"normalise": True, "recent_share": 0.0}),
    Pair("kvzip", "kvzip", "KVzip, no template", {}),
    Pair("kvzip, heads may be left empty", "kvzip", "KVzip, no template", {"lower_bound": 0}),
    Pair("the same, in the chat template", "kvzip", "KVzip", {"lower_bound": 0}, framed=True),
    Pair("kvcompose", "kvcompose", "KVCompose", {}),
    Pair("kvcompose, kvpress", "kvcompose", "KVCompose", {"kvpress": True, "lower_bound": 0}),
    Pair("pyramidkv", "pyramidkv", "PyramidKV", {}, scored=False),
    Pair("pyramidkv, kvpress", "pyramidkv", "PyramidKV", {"budgets": "kvpress"}, scored=False),
    Pair("cur", "cur", "CUR", {}),
    Pair("finch", "finch", "Finch", {}, asks=True),
    Pair("simlayerkv, a threshold", "simlayerkv", "SimLayerKV", {"recent": 63}, scored=False, threshold=True),
    Pair("chunk(snapkv)", "chunk(snapkv)", "ChunkKV(SnapKV)", {}, scored=False),
    Pair("critical(snapkv)", "critical(snapkv)", "CriticalKV(SnapKV)", {}, scored=False),
    Pair("critical(snapkv), mean of rows", "critical(snapkv)", "CriticalKV(SnapKV)", MEAN_ROWS, scored=False),
    Pair(
        "critical(expected_attention)",
        "critical(expected_attention)",
        "CriticalKV(ExpectedAttention)",
        {"value_norm": False},
        scored=False,
    ),
    Pair("ada(snapkv)", "ada(snapkv)", "AdaKV(SnapKV)", {}, scored=False),
    Pair(
        "ada(expected_attention)",
        "ada(expected_attention)",
        "AdaKV(ExpectedAttention)",
        {"epsilon": 1e-2},
        scored=False,
    ),
    Pair(
        "ada(critical(expected_attention))",
        "ada(critical(expected_attention))",
        "CriticalAdaKV(ExpectedAttention)",
        {"value_norm": False},
        scored=False,
    ),
]


def draw(model: Path, family: Family, source: Path, folder: Path, pairs: Sequence[Pair] = PAIRS) -> dict[str, Any]:
    """Write what both sides read, and return it: ids of contexts, what opens them in a chat, entries that stay.

    Args:
        model: its folder.
        family: the model.
        source: folder of the text.
        folder: what passes between the sides.
        pairs: whose presses run.
    """
    text = (source / "test.txt").read_text(encoding="utf-8")
    drawn = [each.ids for each in contexts(family.tokenizer, text, CONTEXTS)]
    head, begins, _ = text_frame(family, "a")
    given = {
        "model": str(model.resolve()),
        "contexts": drawn,
        "opening": text_ids(family, head[:begins]),
        "counts": [[int(len(ids) * keep) for keep in ENTRIES] for ids in drawn],
        "asked": ASKED,
        "presses": sorted({pair.press for pair in pairs}),
    }
    file = folder / "contexts.json"
    if file.exists() and json.loads(file.read_text()) != given:
        raise SystemExit(f"{file} is of other contexts; take another --folder")
    file.write_text(json.dumps(given))
    return given


def decided(
    backbone: CompressedBackbone,
    method: Eviction,
    opening: Sequence[int],
    ids: Sequence[int],
    budgets: Sequence[int | Threshold],
    asked: int = 0,
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return what a method decides of a context, for each budget: kept marks, scores, and marks of what is protected.

    Args:
        backbone: in evaluation mode.
        method: an eviction.
        opening: tokens before the context, which stay.
        ids: the context's.
        budgets: entries that stay in a head, or thresholds.
        asked: last tokens that stand for a question and stay.
    """
    family, whole = backbone.family, (*opening, *ids)
    shape, system = family.shape, len(opening)
    if asked:
        batch = text_batch(family, [EncodedText(whole, len(ids) - asked, system_length=system)])
    else:
        batch = contexts_of(text_batch(family, [EncodedText((*whole, ids[-1]), len(ids), system_length=system)]))
    settings = [
        Compression(method, threshold=each)
        if isinstance(each, Threshold)
        else Compression(method, each - asked, unit="tokens")
        for each in budgets
    ]
    found = []
    with reading_packed(family.decoder.config), torch.no_grad():
        seen = EvictionPass(settings[0], family, batch, backbone.reducer, backbone.group_budget)
        run_whole(backbone, batch, seen, LayerPacker(backbone, settings[0], PackedCache(shape.num_layers), len(whole)))
        for own in settings:
            seen.compression = own
            kept = [each[0].expand(shape.num_kv_heads, -1) for each in seen.keep()]
            best = [method.at_budget(seen.scores[layer], *seen.budgets[layer]) for layer in range(shape.num_layers)]
            scores = [each.scores_BhN[0].expand(shape.num_kv_heads, -1) for each in best]
            protected = [each.protected_BN[0].expand(shape.num_kv_heads, -1) for each in best]
            found.append(tuple(torch.stack(each)[..., len(opening) :] for each in (kept, scores, protected)))
    return found


def compare(ours: tuple[Tensor, Tensor, Tensor], theirs: dict[str, Any], scored: bool) -> dict[str, Any]:
    """Compare what both sides decide of a context with one budget.

    Args:
        ours: see ``decided``.
        theirs: ``kept`` and ``scores`` of the press, [L, h, N].
        scored: whether scores are compared.

    Returns:
        Entries that each side and both keep. ``largest``: distance of two scores; ``ranks``: the lowest correlation of
        a head; ``widest``: the largest distance, in the press's scores, of an entry that one side alone keeps from the
        worst that the press keeps in that head, 0 where all of these are ties.
    """
    kept, scores, protected = ours
    apart, its = kept ^ theirs["kept"], theirs["scores"]
    counts = (kept, theirs["kept"], kept & theirs["kept"])
    found: dict[str, Any] = dict(zip(COUNTS, (int(each.sum()) for each in counts), strict=True))
    if scored:
        free = ~protected & (its < its.amax(-1, keepdim=True))  # what a press pads stands above all else
        first, second = _of_largest(scores, free), _of_largest(its, free)
        found["largest"] = float((first - second).abs().masked_fill(~free, 0).max())
        heads = zip(*(each.flatten(0, 1) for each in (first, second, free)), strict=True)
        found["ranks"] = min(_rank_correlation(a[some], b[some]) for a, b, some in heads)
        whole = _of_largest(its, torch.ones_like(free))
        worst = whole.masked_fill(~theirs["kept"], torch.inf).amin(-1, keepdim=True)
        found["widest"] = float((whole - worst).abs().masked_fill(~apart, 0).max())
    return found


COUNTS = ("ours", "kvpress", "both")
WORST = {"largest": max, "ranks": min, "widest": max}


def together(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what contexts have together: sums of counts, the worst of the scores."""
    sums: dict[str, Any] = {key: sum(each[key] for each in found) for key in COUNTS}
    return sums | {
        key: float(f"{worst(each[key] for each in found):.3g}") for key, worst in WORST.items() if key in found[0]
    }


def _of_largest(scores: Tensor, among: Tensor) -> Tensor:
    """Return scores as shares of the largest magnitude of their head among the marked entries."""
    return scores / scores.masked_fill(~among, 0).abs().amax(-1, keepdim=True).clamp(min=1e-30)


def _rank_correlation(first: Tensor, second: Tensor) -> float:
    ranks = [each.argsort(stable=True).argsort().double() for each in (first, second)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


def measure(
    backbone: CompressedBackbone, given: dict[str, Any], folder: Path, pairs: Sequence[Pair]
) -> list[dict[str, Any]]:
    """Return a row for each pair: for every budget, what the contexts have together."""
    theirs = [torch.load(folder / f"theirs-{i}.pt")["found"] for i in range(len(given["contexts"]))]
    rows = []
    for pair in pairs:
        method = build_eviction(pair.notation, **pair.options)
        each: list[list[dict[str, Any]]] = [[] for _ in ENTRIES]
        for ids, counts, found in zip(given["contexts"], given["counts"], theirs, strict=True):
            budgets = [Threshold(keep, window=0) for keep in ENTRIES] if pair.threshold else counts
            opening, asked = given["opening"] if pair.framed else (), ASKED if pair.asks else 0
            ours = decided(backbone, method, opening, ids, budgets, asked)
            for place, (own, its) in enumerate(zip(ours, found[pair.press], strict=True)):
                each[place].append(compare(own, its, pair.scored))
        rows.append({"ours": pair.words, "kvpress": pair.press, "budgets": [together(some) for some in each]})
        print(rows[-1], flush=True)
    return rows


def run(model: Path, source: Path, python: str, folder: Path) -> None:
    """Run both sides on a model, and put the rows that its record lacks into it."""
    backbone = load_backbone(model, loading={"dtype": "float32"})
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    before = {row["ours"]: row for row in record.get(model.name, {}).get("rows", [])}
    pairs = [pair for pair in PAIRS if pair.words not in before]
    given = draw(model, backbone.family, source, folder, pairs)
    subprocess.run([python, "-m", "benchmarks.real_kvpress", str(folder)], cwd=ROOT, check=True)
    facts = {
        "weights_sha256": sha256(b"".join(path.read_bytes() for path in sorted(model.glob("*.safetensors")))),
        "contexts_sha256": sha256(json.dumps(given["contexts"]).encode()),
        "tokens": [len(ids) for ids in given["contexts"]],
        "kept": given["counts"],
        "versions": {
            "kvpress's side": torch.load(folder / "theirs-0.pt")["versions"],
            "ours": {each: version(each) for each in ("transformers", "torch")},
        },
    }
    if before and {**record[model.name], "rows": []} != {**facts, "rows": []}:
        raise SystemExit(f"{RECORD.name} has {model.name} under other conditions; take its entry out to run all pairs")
    rows = before | {row["ours"]: row for row in measure(backbone, given, folder, pairs)}
    record[model.name] = {**facts, "rows": [rows[pair.words] for pair in PAIRS]}
    RECORD.write_text(json.dumps(record, separators=(",", ":")) + "\n", encoding="utf-8")


def table(record: dict[str, Any]) -> str:
    """Write the rows that all models have as one table, a cell's numbers in the models' order."""
    shares = [f"{keep:.1%} kept" for keep in ENTRIES]
    lines = [f"| ours | kvpress | scores apart | rank correlation | {' | '.join(shares)} |", "|---" * 7 + "|"]
    models = [{row["ours"]: row for row in model["rows"]} for model in record.values()]
    for words in models[0]:
        if not all(words in model for model in models):
            continue
        rows = [model[words] for model in models]
        own = [row["budgets"][0] for row in rows]
        scores = [" / ".join(form(each[key]) for each in own if key in each) for key, form in SCORES.items()]
        budgets = zip(*(row["budgets"] for row in rows), strict=True)
        cells = [rows[0]["ours"], rows[0]["kvpress"], *scores]
        lines.append(f"| {' | '.join([*cells, *(' / '.join(map(alike, each)) for each in budgets)])} |")
    return "\n".join(lines)


SCORES = {"largest": "{:.0e}".format, "ranks": "{:.4f}".format}


def alike(budget: dict[str, Any]) -> str:
    """Return the share of the kept entries that both sides keep, in %, of the side that keeps more."""
    most = max(budget["ours"], budget["kvpress"])
    if budget["both"] == most:
        return "all"
    ties = " (ties)" if budget.get("widest", 1) < TIE else ""
    return f"{math.floor(1e4 * budget['both'] / most) / 100:.2f}{ties}"


def main() -> None:
    """Compare, and show the table on the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a language model's folder, with a chat template")
    parser.add_argument("--source", type=Path, help="folder with WikiText's test.txt")
    parser.add_argument("--kvpress", help="the python of an environment with kvpress 0.5.4")
    parser.add_argument("--folder", type=Path, help="what passes between the sides (default: a temporary one)")
    parser.add_argument("--table", action="store_true", help="the table of the record, and no measuring")
    args = parser.parse_args()
    if not args.table:
        if None in (args.model, args.source, args.kvpress):
            parser.error("--model DIR --source DIR --kvpress PYTHON, or --table")
        with tempfile.TemporaryDirectory() as made:
            folder = args.folder or Path(made)
            folder.mkdir(parents=True, exist_ok=True)
            run(args.model, args.source, args.kvpress, folder)
    print(made := table(json.loads(RECORD.read_text(encoding="utf-8"))))
    before, rest = PAGE.read_text(encoding="utf-8").split(START + "\n")
    PAGE.write_text(f"{before}{START}\n{made}\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
