"""Results folders, score files and tables that ``report`` and ``export --metrics`` read."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tests.hostile.case import Answer, Case, Expect, Place
from tests.hostile.values import HUGE, INFINITY, NAMES, NAN, changed, damaged, mutated, no_file, shown, written

NOT_A_NUMBER = ("x", None, [], {}, NAN, INFINITY, True)
INVALID_RECORD: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ("kv_bytes", "dense_kv_bytes", "region_bytes", "entries_before", "new_tokens", "batch_size"),
        (*NOT_A_NUMBER, 1.5, HUGE, -1),
    ),
    **dict.fromkeys(("prefill_seconds", "decode_seconds", "values_after"), (*NOT_A_NUMBER, HUGE)),
    "score": NOT_A_NUMBER,
    "id": (5, None, [], {}),
    "kind": (5, None, [], {}),
    "prediction": (5, None, {}, True, [None], ["x"]),
    "reference": (5, None, [], "x"),
    "prompt_sha256": (5, None, []),
    "kept_visual": (5, [], "zz", "0"),
}
INVALID_MANIFEST: dict[tuple[str, ...], tuple[Any, ...]] = {
    ("schema",): ("1", None, 99, [], NAN),
    ("rows",): (*NOT_A_NUMBER, -1, 1.5),
    ("task",): (5, None, [], "nope", "../x", "", "\x1b[31m"),
    ("options",): (5, "x", None, []),
    ("primary",): (5, None, [], "nope"),
    ("points",): (5, "x", None, {}),
    ("samples_sha256",): (5, None, []),
    ("settings",): (5, "x", None, []),
    ("arm",): (5, "x", None, [], {}),
    ("arm", "name"): (5, None, [], "", "../x", "a/b", "\x00"),
    ("arm", "nominal_kv"): (*NOT_A_NUMBER, -1),
    ("arm", "reducer"): (5, None, []),
    ("arm", "seed"): ("x", [], 1.5),
    ("arm", "trained"): ("x", None, 5),
    ("arm", "anchor"): (5, [], {}),
    ("arm", "protocol"): (5, None, "nope"),
}
MARKUP = (
    "[red]x[/red]",
    "[/bold]",
    "[link=http://x]y",
    "=cmd|' /C calc'!A0",
    "+1",
    "@x",
    "[bold",
    "<script>alert(1)</script>",
    "a|b",
    "\\end{table}",
    "$x_1$",
    "{{7*7}}",
    "x" * 250,
)


def make(draw: random.Random, place: Place) -> Case:
    """A results folder with something wrong in it."""
    kind = draw.choice(
        ("records", "records", "records", "manifest", "manifest", "names", "scores", "paper", "line", "file", "control")
    )
    return KINDS[kind](draw, place)


def cell(draw: random.Random, place: Place) -> Path:
    """A copy of the results; one folder of an arm and task in it."""
    folder = place.copy("results")
    return draw.choice(sorted(path.parent for path in folder.rglob("manifest.json")))


def report(draw: random.Random, what: str, expect: Expect, *further: str, complaint: Any = None) -> Case:
    """``report`` on the results."""
    formats = draw.choice(([], ["--format", "csv"], ["--format", "html,markdown"], ["--format", "latex"]))
    return Case(
        f"report {what}",
        ["report", "results", "--out", "tables", *formats, *further],
        expect,
        ("tables",),
        complaint=complaint,
    )


def records(draw: random.Random, place: Place) -> Case:
    """A record with a field that cannot be."""
    path = next(cell(draw, place).glob("samples-*.jsonl"))
    lines = path.read_text().splitlines()
    row = draw.randrange(len(lines))
    content = json.loads(lines[row])
    if draw.random() < 0.5:
        key = draw.choice(list(INVALID_RECORD))
        value = draw.choice(INVALID_RECORD[key])
        if key == "kind" and value is None:
            value = 5
        content, what, expect = changed(content, (key,), value), f"{key} is {shown(value)}", Expect.REFUSED
    else:
        content, what = mutated(draw, content)
        expect = Expect.EITHER
    lines[row] = written(content)
    path.write_text("\n".join(lines) + "\n", errors="surrogatepass")
    return report(draw, f"record: {what}", expect)


def manifest(draw: random.Random, place: Place) -> Case:
    """A manifest with a field that cannot be."""
    path = cell(draw, place) / "manifest.json"
    content = json.loads(path.read_text())
    kind = draw.choice(("invalid", "invalid", "mutated", "damage"))
    if kind == "invalid":
        key = draw.choice(list(INVALID_MANIFEST))
        value = draw.choice(INVALID_MANIFEST[key])
        path.write_text(written(changed(content, key, value)))
        return report(draw, f"manifest: {'.'.join(key)} is {shown(value)}", Expect.REFUSED)
    if kind == "mutated":
        content, what = mutated(draw, content)
        path.write_text(written(content), errors="surrogatepass")
        return report(draw, f"manifest: {what}", Expect.EITHER)
    spoilt, what = damaged(draw, path.read_bytes())
    path.write_bytes(spoilt)
    return report(draw, f"manifest: {what}", Expect.EITHER)


def names(draw: random.Random, place: Place) -> Case:
    """Names that mean something to a terminal, a spreadsheet, LaTeX or a browser; they must come out as they are."""
    path = cell(draw, place) / "manifest.json"
    content = json.loads(path.read_text())
    field, value = (
        draw.choice(("name", "name", "backbone", "reducer", "adapter", "eviction")),
        draw.choice((*MARKUP, *NAMES)),
    )
    if (
        field == "name"
        and not any(letter in value for letter in "/\\\x00")
        and 0 < len(value.encode("utf-8", "surrogatepass")) < 200
        and value not in (".", "..")
    ):
        target = path.parent.parent.with_name(value)
        if "\ud800" not in value and not target.exists():
            path.parent.parent.rename(target)
            path = target / path.parent.name / path.name
    for manifest_file in path.parent.parent.glob("*/manifest.json"):
        other = json.loads(manifest_file.read_text())
        other["arm"][field] = value
        manifest_file.write_text(json.dumps(other))
    del content

    def told(answer: Answer) -> str | None:
        return table_fault(place.work / "tables")

    return report(draw, f"{field} is {shown(value)}", Expect.EITHER, complaint=told)


def table_fault(folder: Path) -> str | None:
    """What a spreadsheet or a browser would run of the written files."""
    import csv

    for path in folder.glob("*.csv"):
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.reader(file):
                for text in row:
                    if text.startswith(("=", "+", "@", "-", "\t", "\r")) and not _number(text):
                        return f"{path.name} holds the cell {text[:60]!r}"
    for path in folder.glob("*.html"):
        if "<script>alert" in path.read_text(encoding="utf-8"):
            return f"{path.name} holds a script"
    return None


def _number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return text == "-"
    return True


def scores(draw: random.Random, place: Place) -> Case:
    """A file of ``evaluate --out`` that ``export --metrics`` puts on a card."""
    path = place.copy("scores.json")
    place.copy("run/adapter", "adapter")
    content = json.loads(path.read_text())
    expect = Expect.EITHER
    kind = draw.choice(("invalid", "mutated", "damage", "file"))
    if kind == "invalid":
        key = draw.choice(
            (
                *("kinds", "scores", "measures", "nominal_kv", "realised_kv", "kv_bytes", "dense_kv_bytes", "arm"),
                *("data_sha256", "data"),
            )
        )
        value = draw.choice((5, {}, [], None, "x", NAN, [[]], [NAN, 1, 1, 1], ["x"] * 4, 0))
        right = {
            "kv_bytes": (5, 0),
            "dense_kv_bytes": (5,),
            "nominal_kv": (5, 0),
            "realised_kv": (5, 0),
            "arm": ("x",),
            "data_sha256": ("x",),
            "data": ("x",),
            "kinds": (["x"] * 4,),
            "measures": ({},),
        }
        content["runs"][0][key] = value
        what, expect = f"{key} is {shown(value)}", Expect.EITHER if value in right.get(key, ()) else Expect.REFUSED
        path.write_text(json.dumps(content))
    elif kind == "mutated":
        content, what = mutated(draw, content)
        path.write_text(written(content), errors="surrogatepass")
    elif kind == "damage":
        spoilt, what = damaged(draw, path.read_bytes())
        path.write_bytes(spoilt)
    else:
        what, expect = no_file(draw, path), Expect.REFUSED
    return Case(f"export --metrics: {what}", ["export", "adapter", "out", "--metrics", "scores.json"], expect, ("out",))


def paper(draw: random.Random, place: Place) -> Case:
    """Printed tables."""
    place.copy("results")
    path = place.copy("paper.json")
    kind = draw.choice(("mutated", "mutated", "mutated", "damage", "file", "control"))
    expect = Expect.EITHER
    if kind == "mutated":
        content, what = mutated(draw, json.loads(path.read_text()))
        path.write_text(written(content), errors="surrogatepass")
    elif kind == "damage":
        spoilt, what = damaged(draw, path.read_bytes())
        path.write_bytes(spoilt)
    elif kind == "file":
        what, expect = no_file(draw, path), Expect.REFUSED
    else:
        what, expect = "valid", Expect.TAKEN
    return report(draw, f"printed tables: {what}", expect, "--compare-paper", "paper.json")


def line(draw: random.Random, place: Place) -> Case:
    """Lines of records that were cut, doubled or spoilt; by the library's own reader too."""
    path = next(cell(draw, place).glob("samples-*.jsonl"))
    content, what = damaged(draw, path.read_bytes())
    path.write_bytes(content)
    if draw.random() < 0.3:
        from subtoken_train.evaluation.results.store import read_samples

        return Case(f"read_samples {what}", lambda: read_samples(path.parent), Expect.EITHER)
    return report(draw, f"records: {what}", Expect.EITHER)


def other_file(draw: random.Random, place: Place) -> Case:
    """No file where one belongs."""
    folder = cell(draw, place)
    path = draw.choice((folder / "manifest.json", next(folder.glob("samples-*.jsonl")), folder, folder.parent))
    what = f"{path.name}: {no_file(draw, path)}"
    return report(draw, what, Expect.EITHER)


def whole(draw: random.Random, place: Place) -> Case:
    """Results as ``evaluate`` left them."""
    place.copy("results")
    return report(draw, "whole", Expect.TAKEN)


KINDS = {
    "records": records, "manifest": manifest, "names": names, "scores": scores, "paper": paper, "line": line,
    "file": other_file,
    "control": whole,
}  # fmt: skip
