"""Every arm that was asked of a real language model in one table, from committed records, and what pages show of it.

    python -m benchmarks.real_results    # results/real_text/arms.csv, tables of README.md and docs/real_text.md

A row is an arm on one judge: facts as codes with the text that follows (``real_text*.py``), or RULER's tasks
(``real_ruler.py``). Losses are above the full cache of the same machine, paired, with 95 % intervals.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from benchmarks import real_text_bytes, real_text_trained
from benchmarks.pages import put
from benchmarks.pairs import markdown
from benchmarks.real_ruler import FULL, RECORDS, judges
from benchmarks.real_text import HALVES, NAMES, OUT, ROOT, TWELVE, by_arm, facts_above, full_caches, read, text_above
from subtoken_train.cli.recommend import COLUMNS, interval_cell
from subtoken_train.evaluation.intervals import bootstrap_interval

CSV, IN_WORDS = OUT / "arms.csv", {"smollm2": "words.csv", "qwen05": "words_qwen05.csv"}
FIRST = f"first {HALVES.removesuffix(' by norm, values turned')}, values turned"
README = {
    FULL: "full cache", "kvzip 42% in int8": "KVzip, int8",
    "kvzip 37.5% in int4_rotated": "KVzip, fewer whole tokens, 4 bits",
    f"kvzip 46.6% in int4_rotated, {HALVES}": "KVzip, half of the value groups, 4 bits",
}  # fmt: skip
"""Arms of README's table and their words, the page's and RULER's; groups are of rotated values."""
PAGE = {
    **README, f"int4_rotated of everything, {HALVES}": "all tokens, half of the value groups, 4 bits",
    f"int4_rotated of everything, {FIRST}": "all tokens, the same half for every token (`leading`), 4 bits",
    f"kvzip 46.6% in int4_rotated, {FIRST}": "KVzip, the same half for every token (`leading`), 4 bits",
    "kvzip 46.5% in int4_rotated": "KVzip, whole tokens, 4 bits",
    f"kvzip 50.5% in int4_rotated, {TWELVE}": "KVzip, three quarters of the value groups, 4 bits",
    "kvzap 42% in int8": "KVzap, int8", "kvzip 21.9%": "KVzip, bfloat16", "snapkv 21.9%": "SnapKV, bfloat16",
}  # fmt: skip
FIRST_COMMANDS = """<!-- needs: a network -->
```
make real                     # {real}: asks SmolLM2 about a text. Last line:
                              # {last}
make fit                      # {fit}: trains a router on a tiny vision model
source .venv/bin/activate     # for `subtoken-train`
```"""
LENGTHS = (1024, 2048, 4096)
TASKS = {
    FULL: README[FULL], "kvzip 0.42 int8": README["kvzip 42% in int8"], "kvzap 0.42 int8": PAGE["kvzap 42% in int8"],
    "kvzip 0.466 int4_rotated": PAGE["kvzip 46.5% in int4_rotated"],
    "S16K12 value_norm, kvzip 0.505 int4_rotated, values turned": PAGE[f"kvzip 50.5% in int4_rotated, {TWELVE}"],
    "S16K8 value_norm, kvzip 0.578 int4_rotated, values turned": README[f"kvzip 46.6% in int4_rotated, {HALVES}"],
    "S16K8 value_norm, kvzip 0.466 int4_rotated, values turned": "KVzip, fewer tokens and half of the groups, 4 bits",
    "S16K8 leading, kvzip 0.466 int4_rotated, values turned": PAGE[f"kvzip 46.6% in int4_rotated, {FIRST}"],
    "S16K8 value_norm, int4_rotated, values turned": PAGE[f"int4_rotated of everything, {HALVES}"],
    "kvzip 0.219": PAGE["kvzip 21.9%"], "compactor 0.219": "Compactor, bfloat16",
    "snapkv 0.219": PAGE["snapkv 21.9%"],
}  # fmt: skip


def frame() -> pd.DataFrame:
    """Return every arm on every judge."""
    arms = ((file, *each) for file in sorted(OUT.glob("*.jsonl.xz")) for each in by_arm(file).items())
    evictions = (_row(file.name.partition(".")[0], arm, [own]) for file, arm, own in arms)
    rows = [*evictions, *_byte_budgets(), *_trained(), *_ruler()]
    return pd.DataFrame(rows).sort_values(["judge", "model", "bytes", "arm"], ascending=[True, True, False, True])


def _byte_budgets() -> Iterable[dict[str, Any]]:
    for model in real_text_bytes.HEADS:
        full, records = full_caches(OUT / f"{model}.jsonl.xz"), read(real_text_bytes.records_of(model))
        kinds = [real_text_bytes.Arm(*(own[name] for name in real_text_bytes.Arm._fields)) for own in records]
        for arm in dict.fromkeys(kinds):
            seeds = [r | {"full": full[r.get("gpu")]} for r, kind in zip(records, kinds, strict=True) if kind == arm]
            yield _row(model, f"byte budget {arm.size}: {real_text_bytes.words(arm)}", seeds)


def _trained() -> Iterable[dict[str, Any]]:
    full = full_caches(OUT / "smollm2.jsonl.xz")[None]
    names = ("loss", "way", "arm")
    records = sorted(read(real_text_trained.OUT), key=lambda own: [own[name] for name in names])
    for (loss, way, arm), own in groupby(records, key=lambda own: tuple(own[name] for name in names)):
        words = f"trained ({loss}), asked with the {way} budget: {real_text_trained.ARMS[arm][1]}"
        yield _row("smollm2", words, [each | {"full": full} for each in own])


def _row(model: str, arm: str, seeds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    lost = {key: np.array([*map(of, seeds)]) for key, of in (("facts", facts_above), ("text", text_above))}
    figures = {key: value for name, sn in lost.items() if sn.size for key, value in _figures(name, sn).items()}
    share, recalled = (np.mean([np.mean(own[name]) for own in seeds]) for name in ("share", "exact"))
    about = {"n": lost["facts"].shape[1], "seeds": len(seeds), "machine": seeds[0].get("gpu", "CPU")}
    return {"judge": "codes", "model": model, "arm": arm, "bytes": share, "recalled": recalled} | figures | about


def _figures(name: str, apart_sn: npt.NDArray[np.float64]) -> dict[str, float]:
    low, high = bootstrap_interval(apart_sn)
    return {name: float(apart_sn.mean()), f"{name}_low": low, f"{name}_high": high}


def _ruler() -> Iterable[dict[str, Any]]:
    for file in sorted(RECORDS.glob("*.jsonl.xz")):
        (record,) = read(file)
        judged, full = np.isin(record["kinds"], judges(record)), np.array(record["arms"][FULL]["scores"])
        about = {"judge": f"RULER {record['options']['length']}", "model": record["model"], "seeds": 1}
        about |= {"n": int(judged.sum()), "machine": record["device"]}
        for arm, own in record["arms"].items():
            scores = np.array(own["scores"])
            figures = {"score": 100 * scores[judged].mean()} | _figures("points", 100 * (scores - full)[judged][None])
            yield {"arm": arm, "bytes": float(np.mean(own["share"]))} | figures | about


def facts_table(rows: pd.DataFrame, chosen: Mapping[str, str], losses: bool) -> str:
    """Write arms by size: facts recalled on each model, and with ``losses`` what is lost, and all that is in words."""
    codes = rows[rows["judge"] == "codes"].set_index(["model", "arm"])
    kinds = ["codes recalled", *["codes, nats", "text, nats a token"] * losses]
    asked = {NAMES[model]: pd.read_csv(OUT / IN_WORDS[model], index_col="arm") for model in [*IN_WORDS][: 1 + losses]}
    few = {name: f" (n = {own['n'].iloc[0]})" * losses for name, own in asked.items()}
    told = {f"{name}: facts in words{few[name]}": own["value"] for name, own in asked.items()}
    head = ["cache", "bytes", *(f"{name}: {kind}" for name in NAMES.values() for kind in kinds), *told]
    lines = []
    for arm, words in chosen.items():
        own = [codes.loc[model, arm] if (model, arm) in codes.index else None for model in NAMES]
        size = next(float(each["bytes"]) for each in own if each is not None)
        cells = [cell for each in own for cell in _cells(each, losses)]
        cells += [f"{own[words]:.0%}" if words in own else "not asked" for own in told.values()]
        lines.append((size, [words, f"{size:.1%}", *cells]))
    return markdown(head, [cells for _, cells in sorted(lines, key=lambda line: -line[0])])


def _cells(own: Any, losses: bool) -> list[str]:
    if own is None:
        return ["not asked", *["", ""] * losses]
    told = [_interval(own, "facts"), _interval(own, "text")] if own.name[1] != FULL else ["", ""]
    few = "" if own["n"] == 60 else f" (n = {own['n']})"
    return [f"{own['recalled']:.0%}{few}", *told * losses]


def _interval(own: Any, name: str) -> str:
    found = [own[f"{name}{end}"] for end in ("", "_low", "_high")]
    return interval_cell(found, COLUMNS["tasks" if name == "points" else name][2])


def tasks_table(rows: pd.DataFrame) -> str:
    """Write arms on RULER's tasks at each length: the mean score and the points less than the full cache."""
    lines, asked = [], rows[rows["model"] == "qwen05"]
    for arm, words in TASKS.items():
        own = [asked[(asked["judge"] == f"RULER {length}") & (asked["arm"] == arm)] for length in LENGTHS]
        size = next(float(each["bytes"].iloc[0]) for each in own if len(each))
        cells = [cell for each in own for cell in _task_cells(each, arm)]
        lines.append((size, [words, f"{size:.1%}", *cells]))
    head = ["cache", "bytes", *(f"{length:,} tokens: {what}" for length in LENGTHS for what in ("score", "less full"))]
    return markdown(head, [cells for _, cells in sorted(lines, key=lambda line: -line[0])])


def _task_cells(found: pd.DataFrame, arm: str) -> list[str]:
    if not len(found):
        return ["not asked", ""]
    own = found.iloc[0]
    return [f"{own['score']:.0f}", "" if arm == FULL else _interval(own, "points")]


def speed() -> str:
    """Write what SmolLM2 takes and recalls with all tokens and three quarters of their value groups."""
    own = pd.read_json(OUT.parent / "speed/thin_layers.json").query("model == 'smollm2' and by == 'C'").iloc[0]
    step, prompt = (own[name][-1][kind]["dynamic"][0] for name, kind in (("steps", "step"), ("passes", "pass")))
    (arm,) = pd.read_csv(CSV).query("model == 'smollm2' and arm == '12 of 16 value groups by norm'").itertuples()
    words = f"{arm.bytes:.1%} of the bytes, {arm.recalled:.0%} of the codes. At {own['steps'][-1]['entries']:,} tokens"
    return f"{words} a step takes {step:.0%} of the time, a prompt {prompt:.0%}."


def commands() -> str:
    """Write the first commands, the minutes that each took, and from its notebook the last words of ``make real``."""
    cells = json.loads((ROOT / "notebooks/01_smollm2.ipynb").read_text(encoding="utf-8"))["cells"]
    said = [line for cell in cells for made in cell.get("outputs", ()) for line in made.get("text", ())]
    last = next(line for line in said if ": take " in line).strip()
    took = pd.read_csv(OUT.parent / "first_commands.csv", index_col="command")
    real, fit = (f"{own['minutes']} minutes{own['download']}" for _, own in took.fillna("").iterrows())
    return FIRST_COMMANDS.format(real=real, last=re.sub(r"\(.*, (\d+ samples)\)", r"(\1)", last), fit=fit)


def main() -> None:
    """Write the table and the pages."""
    rows = frame()
    rows.to_csv(CSV, index=False, float_format="%.5g")
    put(ROOT / "README.md", "real", facts_table(rows, README, losses=False))
    put(ROOT / "README.md", "speed", speed())
    put(ROOT / "README.md", "commands", commands())
    put(ROOT / "docs/real_text.md", "real", facts_table(rows, PAGE, losses=True))
    put(ROOT / "docs/real_text.md", "ruler", tasks_table(rows))


if __name__ == "__main__":
    main()
