"""Methods that are trained to drop entries, beside others of the same bytes, on SmolLM2, before the question is known.

python -m benchmarks.rivals texts again.jsonl             # what arms of recipes/real/rivals.yaml learn from
python -m benchmarks.rivals record results/rivals rivals  # results/real_text/rivals.csv.xz, table of trained_arms.md
"""

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from benchmarks.pages import put
from benchmarks.pairs import markdown
from benchmarks.real_text import OUT, ROOT
from subtoken_train.cli.recommend import interval_cell as cell
from subtoken_train.evaluation.intervals import bootstrap_interval

PAGE = ROOT / "docs/trained_arms.md"
ASKED = {"facts": "facts, %", "manual_qa": "manuals, %"}
PROSE = Path("data/english_text/train.jsonl")
SHOWN = {
    "rivals": "DMS|LKV, from KVzap's nets|byte budget, from KVzap's nets|KVzap, nets of two layers|KVzip (reads twice)|"
    "KVzap, 4 bits|KVzap, fewer entries, 4 bits|KVzip (reads twice), fewer entries, 4 bits",
    "adapted": "recipe with value groups, on WikiText|recipe, on WikiText|recipe, untrained|LKV, LoRA, on WikiText|"
    "recipe, on prose, 4 bits|recipe, on WikiText, more entries, 4 bits|recipe, on WikiText, 4 bits|"
    "KVzap, nets of two layers|KVzap, nets of two layers, fewer entries|"
    "recipe, on WikiText, fewer entries|LKV, LoRA, on WikiText, fewer entries",
}
"""Arms of the tables; the records hold more, which others are compared with."""


def chats() -> Iterator[str]:
    """Yield chats: 150 words of prose, 8 words from their midst, and, as the answer, the 32 that follow these."""
    drawn, every = random.Random(0), [json.loads(line)["text"].split() for line in PROSE.open()]
    long = [words for words in every if len(words) >= 260]
    for number in range(300):
        (prose,) = drawn.choices(long, [len(words) for words in long])
        words = prose[(start := drawn.randrange(len(prose) - 150)) : start + 150]
        cue, said = words[(part := drawn.randrange(110)) : part + 8], words[part + 8 : part + 40]
        asked = f'{" ".join(words)}\n\nRepeat what follows "{" ".join(cue)}".'
        turns = [{"role": who, "content": what} for who, what in (("user", asked), ("assistant", " ".join(said)))]
        yield json.dumps({"id": f"said-{number}", "messages": turns}) + "\n"


def table(name: str) -> str:
    """Write each arm's bytes, the facts it recalls, and the text it loses against the full cache, samples paired."""
    rows, cells = pd.read_csv(OUT / f"{name}.csv.xz"), []
    rows["arm"] = rows["arm"].str.replace(", seed .", "", regex=True)  # a sample's score is the mean of the seeds
    scores = rows.pivot_table("score", ["task", "id"], "arm")
    for arm, own in rows[rows["arm"].isin(SHOWN[name].split("|"))].groupby("arm"):
        shares = own.groupby("task").sum(numeric_only=True).eval("region_bytes / region_dense_bytes")
        less = (scores[arm] - scores["full cache"])["text_loss"]
        stored = ", ".join(dict.fromkeys(map("{:.1%}".format, shares[["facts", "text_loss"]])))
        right = [100 * scores[arm][task].dropna() for task in ASKED if task in scores.index]
        told = ["{:.0f} [{:.0f}, {:.0f}]".format(x.mean(), *bootstrap_interval(x)) if len(x) else "" for x in right]
        cells.append([str(arm), stored, *told, cell([less.mean(), *bootstrap_interval(less)], 3)])
    cells.sort(key=lambda row: -float(row[1].split("%")[0]))
    return markdown(
        ["cache", "bytes", *[name for task, name in ASKED.items() if task in scores.index], "nats a word"], cells
    )


if __name__ == "__main__":
    if sys.argv[1] == "texts":
        Path(sys.argv[2]).write_text("".join(chats()), encoding="utf-8")
    else:
        files = sorted(Path(sys.argv[2]).glob("*/*/samples-*.jsonl"))
        named = [pd.read_json(each, lines=True).assign(arm=each.parts[-3], task=each.parts[-2]) for each in files]
        named = pd.concat(named)[["arm", "task", "id", "score", "region_bytes", "region_dense_bytes"]]
        if sys.argv[3] != "rivals":  # asked in float32: four bits as a share of bfloat16
            named.loc[named["arm"].str.contains("4 bits"), "region_dense_bytes"] //= 2
        named.to_csv(OUT / f"{sys.argv[3]}.csv.xz", index=False, float_format="%.6g")
        if sys.argv[3] in SHOWN:
            put(PAGE, sys.argv[3], table(sys.argv[3]))
