"""A compression step of one layer, ours beside kvpress's own: scores, choice, and the shortened keys and values.

    python -m venv /tmp/kvpress && /tmp/kvpress/bin/pip install kvpress==0.5.4 transformers==5.2.0   # apart from ours
    OMP_NUM_THREADS=1 python benchmarks/compression_step.py --kvpress /tmp/kvpress/bin/python

One layer with random weights (D = 1,024, 8 query heads of 128 on 2 key-value heads) has read 8,192 rows; half of the
entries stay. Both sides get the same tensors, in a process each, and take their steps in turns; the seconds are the
processor's. Ours starts from what an attention layer shows to its observer (rotated queries, keys and values) and ends
with a packed layer. A press starts from hidden states, keys and values and ends with keys and values; where it looks at
queries it computes them a second time. ``h2o`` is kvpress's observed attention, whose matrix eager attention has to
make: that is part of its step, and there are fewer rows, because it would be 2 GiB.
Values that stay on one side alone are counted. KVCompose and KVzip are no steps of one layer there, and left out.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from benchmarks.pages import put
from benchmarks.pairs import cell, hardware, ratio, write
from benchmarks.shaped import HEAD_DIM, HEADS, WIDTH
from benchmarks.workers import Worker, in_turns
from subtoken_train.cache.pack import Packing, pack_layer
from subtoken_train.engine.prompt_pass import layer_plan
from subtoken_train.evictions import build_eviction
from subtoken_train.functional.rotary import Rotation
from subtoken_train.types import Region
from subtoken_train.view.scores import Candidates
from subtoken_train.view.view import View

ROOT = Path(__file__).resolve().parents[1]
RECORD, PAGE = ROOT / "benchmarks/results/speed/compression_step.json", ROOT / "docs/speed/prompts.md"
ENTRIES, KV_HEADS, KEPT = 8192, 2, 0.5
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "expected_attention": ({}, ENTRIES),
    "compactor": ({"scaled": False, "masked": False}, ENTRIES),
    "keydiff": ({}, ENTRIES),
    "tova": ({"protect_last": True}, ENTRIES),
    "lagkv": ({}, ENTRIES),
    "snapkv": ({"rows": "mean"}, ENTRIES),
    "knorm": ({}, ENTRIES),
    "h2o": ({"recent_share": 0.0, "normalise": True}, 2048),
}
"""Method -> the settings in which it is the press, and rows."""


def layer(folder: Path) -> LlamaModel:
    """Write the layer that both sides load."""
    torch.manual_seed(0)
    config = {
        "vocab_size": 8,
        "hidden_size": WIDTH,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 2 * ENTRIES,
    }
    model = LlamaModel(LlamaConfig(**config)).eval()
    attention = model.layers[0].self_attn
    hidden = torch.randn(1, ENTRIES, WIDTH)
    query, key, value = (
        each(hidden).view(1, ENTRIES, -1, HEAD_DIM).transpose(1, 2)
        for each in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    query, key = apply_rotary_pos_emb(query, key, *model.rotary_emb(hidden, torch.arange(ENTRIES)[None]))
    states = {"hidden": hidden, "query": query, "key": key, "value": value}
    weights = attention.state_dict()
    torch.save({"config": config, "weights": weights, "kept": KEPT, **states}, folder / "layer.pt")
    return model


@torch.no_grad()
def serve(folder: Path) -> None:
    """Our half: answer until the input ends, as ``compression_kvpress.py`` does."""
    torch.set_num_threads(1)
    given = torch.load(folder / "layer.pt")
    rotary = LlamaModel(LlamaConfig(**given["config"])).rotary_emb

    def rotate(position: torch.Tensor) -> Rotation:
        return Rotation(*rotary(torch.empty(()), position))

    print(json.dumps({}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        entries = asked["entries"]
        query, key, value = (given[name][:, :, :entries] for name in ("query", "key", "value"))
        regions, position = torch.full((1, entries), int(Region.CONTEXT)), torch.arange(entries)[None]
        start = time.process_time()
        method = build_eviction(asked["case"], **CASES[asked["case"]][0])
        view = View(
            0, query, key, value, regions, HEAD_DIM**-0.5, method.needs,
            position=position, next_position=position[:, -1:] + 1, rotate=rotate,
        )  # fmt: skip
        budget = torch.tensor([[int(entries * KEPT)]])
        keep = method.keep([method.score(view)], Candidates([regions], [view.entries_BN], budget))[0]
        blocks = pack_layer(key, value, layer_plan(keep), Packing())
        seconds = time.process_time() - start
        if asked["save"]:
            torch.save(keep.expand(1, KV_HEADS, -1), folder / "ours.pt")
        assert blocks
        print(json.dumps(seconds), flush=True)


def one_sided(folder: Path, case: str) -> int:
    """Entries of all heads that one side alone keeps: values that kvpress kept and we did not, and as many of ours."""
    given, kept = torch.load(folder / "layer.pt")["value"][0], torch.load(folder / "ours.pt")[0]
    missing = 0
    for values, theirs, marks in zip(given, torch.load(folder / "theirs.pt")[0], kept, strict=True):
        ours = {tuple(row[:4].tolist()) for row in values[: CASES[case][1]][marks]}
        missing += sum(tuple(row[:4].tolist()) not in ours for row in theirs)
    return 2 * missing


def table(record: dict[str, Any]) -> str:
    """Times and their ratio."""
    lines = ["| method | entries | ours | kvpress | ours / kvpress | entries that one side keeps |", "|---" * 6 + "|"]
    for row in record["rows"]:
        lines.append(
            f"| {row['method']} | {row['entries']:,} | {row['ours_ms']:.1f} ms | {row['kvpress_ms']:.1f} ms "
            f"| {cell(tuple(row['ratio']))} | {row['one_sided']} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, write, and show the table on the page; or be our worker."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kvpress", help="the python of an environment with kvpress 0.5.4")
    parser.add_argument("--pairs", type=int, default=25)
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    parser.add_argument("--out", type=Path, default=RECORD)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve)
        return
    if args.kvpress is None:
        parser.error("--kvpress: which python has kvpress?")
    with tempfile.TemporaryDirectory() as name:
        folder, rows = Path(name), []
        with torch.no_grad():
            layer(folder)
        here = "benchmarks/compression_step.py"
        workers = {
            "ours": Worker(sys.executable, here, "--serve", name),
            "kvpress": Worker(args.kvpress, "benchmarks/compression_kvpress.py", name),
        }
        for case in args.cases:
            seconds: dict[str, list[float]] = {side: [] for side in workers}
            for turn in range(args.pairs + 2):  # two to warm up
                for side in in_turns(workers, turn):
                    taken = float(workers[side].ask(case=case, entries=CASES[case][1], save=turn == 0))
                    seconds[side] += [taken] * (turn > 1)
            rows.append(
                {
                    "method": case,
                    "settings": CASES[case][0],
                    "entries": CASES[case][1],
                    **{f"{side}_ms": 1000 * sorted(each)[len(each) // 2] for side, each in seconds.items()},
                    "ratio": ratio(seconds, "ours", "kvpress"),
                    "one_sided": one_sided(folder, case),
                }
            )
            print(table({"rows": rows[-1:]}).splitlines()[-1], flush=True)
        versions = {"kvpress's side": workers["kvpress"].versions, "ours": {"torch": torch.__version__}}
        for worker in workers.values():
            worker.close()
    record = {"hardware": hardware(), "versions": versions, "pairs": args.pairs, "kept": KEPT, "rows": rows}
    write(record, args.out)
    if args.out == RECORD:
        put(PAGE, "compression_step", table(record))


if __name__ == "__main__":
    main()
