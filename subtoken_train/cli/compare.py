"""``subtoken-train compare``: a run on texts, or a language model alone, beside other ways to spend the same bytes."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from subtoken_train.cli.main import run_command
from subtoken_train.cli.recipe_source import read_recipe
from subtoken_train.cli.report import write_report
from subtoken_train.documents import parse_json, read_text
from subtoken_train.errors import nearest_folder, refuse
from subtoken_train.outputs import write_whole

if TYPE_CHECKING:
    from subtoken_train.evaluation.reporting.report import Report
    from subtoken_train.evaluation.reporting.runs import ArmResults

HELP = """Compare a run with its anchor and with untrained rules at equal KV bytes, on the run's own texts.

  subtoken-train compare runs/mine
  subtoken-train compare checkpoints/smollm2     a model alone: untrained rules beside its full cache

Arms: the full cache; the trained router; its token-only anchor (runs/mine_anchor, else the run's own LoRA); untrained
value groups and KVzip in the same bytes; bits alone. Tasks: the loss on the run's test texts, and facts in words that
are hidden in them. It writes records, tables (Markdown, CSV, LaTeX) and a page with plots, and ends with one sentence
of advice. The same command continues where it stopped."""
BITS = {"int8": 66, "int4_rotated": 34}  # formats of bits alone: bytes of a vector of 64 numbers
_LEAST = 400  # words of a test text below which facts alone are asked, among the sentences of Python's manual
_ALIKE = 1.01  # times the run's bytes that another arm may take to be compared with it, as in a report's verdicts
_OF_ALL = ("name", "keep_ratio", "round_up", "matches")  # settings of every reducer; the others are its own


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="run folder of 'subtoken-train fit' on texts, or folder of a language model")
    parser.add_argument("--text", metavar="FILE", help="text of the tasks (default: test.jsonl beside the run's texts)")
    parser.add_argument("--out", metavar="DIR", help="folder of the results (default: RUN/compare, results/MODEL)")
    parser.add_argument("--contexts", type=int, default=8, help="texts that hide four facts each (default: 8)")
    parser.add_argument("--device", help="cuda:0, cpu, ... (default: the first GPU, if any)")


def run(args: argparse.Namespace) -> int:
    folder = Path(args.run)
    if alone := (folder / "config.json").is_file():
        advised = "compare is for language models; of pictures: subtoken-train evaluate --backbone FOLDER --data FILE"
        refuse(('"vision_config"' in read_text(folder / "config.json"), f"{folder} sees pictures: {advised}"))
        out = Path(args.out or f"results/{folder.name}")
        plain: dict[str, Any] = {"backbone": str(folder), "protocol": "context_first", "dtype": "bfloat16"}
        arms = [
            {"name": "full", **plain},
            {"name": "kvzip_42_int8", **plain, "eviction": "kvzip", "eviction_keep": 0.42, "kv_dtype": "int8"},
            {"name": "kvzip_22", **plain, "eviction": "kvzip", "eviction_keep": 0.2166},
            {"name": "snapkv_42_int8", **plain, "eviction": "snapkv", "eviction_keep": 0.42, "kv_dtype": "int8"},
            {"name": "bits_int4_rotated", **plain, "kv_dtype": "int4_rotated"},
        ]
        text = own_text({}, args.text) if args.text else ""
    elif (folder / "adapter").is_dir():
        recipe, out = read_recipe(folder / "recipe.yaml"), Path(args.out or folder / "compare")
        text, arms = own_text(recipe, args.text), arms_of(recipe, folder)
    else:
        near = f"did you mean {folder.with_name(name)}?" if (name := nearest_folder(folder)) else "check its spelling"
        refuse((not folder.exists(), f"{folder} does not exist; {near}"))
        raise ValueError(f"{folder} has no adapter; train it first: subtoken-train fit --config RECIPE.yaml")
    words = len(text.split())
    tasks: list[dict[str, Any]] = [{"name": "facts", "contexts": args.contexts, "facts": 4, "words": 400}]
    if words < _LEAST and not (alone and args.text is None):
        few = f"the text has {words:,} words, and its loss and a place for facts take {_LEAST}"
        refuse((args.text is not None, f"{few}; give a longer one, or leave --text out"))
        print(f"{few}: facts are hidden in Python's manual, and no loss is asked (--text FILE)", file=sys.stderr)
    if words >= _LEAST:
        out.mkdir(parents=True, exist_ok=True)
        write_whole(out / "test.txt", text)
        tasks[0]["haystack"] = str(out / "test.txt")
        tasks.append({"name": "text_loss", "source": str(out)})
    anchors = "none" if alone or arms[-1]["name"] == "anchor" else "auto"
    grid = {"out": str(out), "batch_size": 4, "anchors": anchors, "arms": arms, "tasks": tasks}
    write_whole(out / "grid.yaml", json.dumps(grid, indent=1) + "\n")
    run_command("evaluate", ["--config", str(out / "grid.yaml"), *(["--device", args.device] if args.device else [])])
    print(f"tables and a page with plots are in {out / 'report'}\n{advice(write_report([out], out / 'report'))}")
    return 0


def own_text(recipe: dict[str, Any], given: str | None) -> str:
    """Return the text of a file, or of ``test.jsonl`` beside a recipe's training texts; empty where there is none."""
    data = recipe.get("data", {})
    if given is None:
        if not isinstance(data.get("train"), dict):
            asked = "subtoken-train evaluate --adapter RUN/adapter --adapter RUN_anchor/adapter --data test.json"
            raise ValueError(f"compare is for runs on texts; on pictures: {asked}")
        path = Path(str(data["train"].get("name"))).with_name("test.jsonl")
    else:
        path = Path(given)
    if not path.is_file():
        refuse((given is not None, f"{path} is not a file; --text takes a text or JSON lines with 'text'"))
        return ""
    text = read_text(path)
    if path.suffix == ".jsonl":
        lines = [line for line in text.splitlines() if line.strip()]
        rows = [parse_json(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]
        said = [row["text"] for row in rows if isinstance(row, dict) and isinstance(row.get("text"), str)]
        if len(said) < len(rows):  # conversations, for one
            print(f"{path}: {len(rows) - len(said):,} of {len(rows):,} records hold no text", file=sys.stderr)
        text = "\n".join(said)
    return text


def arms_of(recipe: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Return the arms of a run's comparison, as a grid has them."""
    model = recipe["model"]
    routing, reducer, path = model.get("routing"), model.get("reducer") or {}, model["backbone"]["path"]
    refuse((not routing, f"{folder} trained no router; compare a routed run (its anchor is found beside it)"))
    groups, kept, keep = routing["num_groups"], routing["kept_groups"], float(reducer.get("keep_ratio", 1))
    by_bytes = routing.get("budget") in ("bytes", "delayed")
    share = routing["byte_share"] if by_bytes else keep * (1 + kept / groups) / 2
    whole = 64 * (4 if model["backbone"].get("dtype", "float32") == "float32" else 2)
    bits = min(BITS, key=lambda name: abs(BITS[name] / whole - share))
    anchor = folder.with_name(f"{folder.name}_anchor") / "adapter"
    plain: dict[str, Any] = {"backbone": path}
    arms: list[dict[str, Any]] = [
        {"name": "full", **plain},
        {"name": "trained", "adapter": str(folder / "adapter")},
        {"name": "kvzip", **plain, "eviction": "kvzip", "eviction_keep": round(share, 6)},
        {"name": f"bits_{bits}", **plain, "kv_dtype": bits},
    ]
    if not by_bytes:
        layout = routing.get("layout", "contiguous")
        name, own = reducer.get("name", "none"), {key: value for key, value in reducer.items() if key not in _OF_ALL}
        cut = {} if name == "none" else {"reducer": name, "keep_ratio": keep, "reducer_options": own}
        norm = {"groups": f"{groups},{kept}", "selector": "value_norm", "layout": layout}
        arms.append({"name": "groups_by_norm", **plain, **cut, **norm})
    return [*arms, {"name": "anchor", "adapter": str(anchor)}] if anchor.is_dir() else arms


def advice(report: "Report") -> str:
    """Say how the trained router (the best arm) stands to the best other (the full cache), on facts or else on text."""
    from subtoken_train.evaluation.reporting.score_tables import Estimate, cost_of, difference_of, score_of

    def share_of(arm: "ArmResults", task: str) -> float:
        return cost_of(arm, [task]).shares["measured"] or 0.0

    def standing(task: str) -> tuple[Estimate, Estimate, str]:
        apart, own = difference_of(ours, other, [task]), score_of(ours, [task])
        assert isinstance(apart, Estimate)
        assert own is not None
        verdict = {"better": "ahead of", "worse": "behind"}.get(apart.verdict or "", "level with")
        return apart, own, f"{verdict} {other.name} ({apart.value_text} {apart.interval_text}, paired, {own.n} samples)"

    arms = {arm.name: arm for arm in report.arms}
    full = score_of(arms["full"], ["facts"])
    assert full is not None
    if not full.value and len(report.task_names) == 1:
        return "the full cache recalls none of these facts, so they tell no cache apart: --text FILE asks its loss, too"
    reads = full.value >= 0.5 or len(report.task_names) == 1
    task, what = ("facts", "% of the facts") if reads else ("text_loss", "nats a word")
    most = _ALIKE * share_of(arms["trained"], task) if "trained" in arms else 1.0
    others = [arm for name, arm in arms.items() if name not in ("trained", "full") and share_of(arm, task) <= most]
    scored = [(score.value, arm) for arm in others if (score := score_of(arm, [task])) is not None]
    if not scored:  # gates may close more than they were trained to
        kept = f"{100 * share_of(arms['trained'], task):.1f} % of the bytes"
        return f"the trained router keeps {kept}, and no other arm as little: see the table"
    top = (max if reads else min)(value for value, _ in scored)
    alike = sorted((arm for value, arm in scored if value == top), key=lambda arm: share_of(arm, task))
    small = [arm for arm in alike if share_of(arm, task) <= _ALIKE * share_of(alike[0], task)]
    best = min(small, key=lambda arm: getattr(score_of(arm, ["text_loss"]), "value", 0.0))
    ours, other = (arms["trained"], best) if "trained" in arms else (best, arms["full"])
    apart, own, stands = standing(task)
    if reads and apart.low == apart.high == 0:
        stands = f"not told apart from {other.name} by these {apart.n} questions (raise --contexts)"
        if "text_loss" in report.task_names:
            apart, _, said = standing("text_loss")
            stands += f"; in text_loss it is {said}"
    first = "" if reads else f"the full cache recalls {full.value_text} % of the facts, so the text's loss decides: "
    bytes_kept = f"{100 * share_of(ours, task):.1f} % of the compressed text's bytes"
    take = ours.name if apart.verdict == "better" or "trained" not in arms else best.name
    return f"{first}in {bytes_kept} {ours.name} has {own.value_text} {what} and is {stands}: take {take}"
