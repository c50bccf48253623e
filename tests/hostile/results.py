"""Results folders, score files and tables that ``report`` and ``export --metrics`` read."""

import csv
import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

from tests.hostile import grammar
from tests.hostile.case import Answer, Case, Expect, Files, Place, Reference, Spoilt, both, command, read_by
from tests.hostile.values import NAMES, NAN, damaged, no_file, shown

COUNTS = "*.kv_bytes *.dense_kv_bytes *.region_bytes *.entries_before *.new_tokens *.batch_size"
RECORDS = grammar.Document(
    grammar.Format(
        legal={
            f"{COUNTS} *.region_dense_bytes *.index_bytes *.entries_after *.unread_bytes": grammar.count,
            "*.kind *.kept_visual": grammar.text_or_none, "*.emptied": lambda value: isinstance(value, dict),
            "*.reference.*": grammar.anything, "*.prediction": lambda value: isinstance(value, str | list),
        },
        unsaid=("*.*", "*.*.*"),
    ),
    {COUNTS: (1.5, -1), "*.reference": ({},), "*.kept_visual": ("zz", "0")}, "odd changed changed changed",
    grammar.LINES,
)  # fmt: skip
PLAIN = (
    "batch_size max_length dtype processes adapter_sha256 reducer eviction_options calibration_sha256 seed versions"
).split()
"""Settings of a manifest that no report prints."""
MANIFEST = grammar.Document(
    grammar.Format(
        free=tuple(f"settings.{name}" for name in PLAIN),
        more=("settings",),
        unsaid=("settings.device",),  # a dash stands for it
        legal={
            "arm.adapter arm.anchor arm.groups source": grammar.text_or_none,
            "arm.seed": lambda value: value is None or type(value) is int,
            "expected_rows": lambda value: value is None or type(value) is int,
            "options.*": grammar.anything,  # of the task's own kind
        },
        exact=("schema", "task"),
    ),
    {
        "schema": (99,), "rows": (-1, 1.5), "task": ("nope", "../x", "", "\x1b[31m"),
        "primary arm.protocol": ("nope",), "arm.name": ("", "../x", "a/b", "\x00"), "arm.nominal_kv": (-1,),
        "arm.seed": (1.5,),
    },
    "odd changed changed changed bytes",
)  # fmt: skip
NO_SCORE = (5, {}, [], None, "x", NAN, [[]], [NAN, 1, 1, 1], ["x"] * 4, 0)
RIGHT_SCORES: dict[str, tuple[Any, ...]] = {  # by key of a run's scores: which of the odd values are right there
    "kinds": (["x"] * 4,), "scores": (), "measures": ({},), "nominal_kv": (5, 0), "realised_kv": (5, 0),
    "kv_bytes": (5, 0), "dense_kv_bytes": (5,), "arm": ("x",), "data_sha256": ("x",), "data": ("x",),
}  # fmt: skip
SCORES = grammar.Document(
    grammar.Format(
        free=("runs.0.seconds",),
        more=("", "runs.0"),
        legal={
            "runs.0.unread_bytes runs.0.prompts_with_an_emptied_region": grammar.count,
            "runs.0.predictions.*": lambda value: isinstance(value, str | list),
            "runs.0.measures": lambda value: value == {} or value is None,
            "runs.0.predictions": lambda value: value is None,
        },
        unsaid=("runs.0.*", "runs.0.measures.*"),
    ),
    {f"runs.0.{key}": tuple(each for each in NO_SCORE if each not in right) for key, right in RIGHT_SCORES.items()},
)
MARKUP = (
    *("[red]x[/red]", "[/bold]", "[link=http://x]y", "=cmd|' /C calc'!A0", "+1", "@x", "[bold"),
    *("<script>alert(1)</script>", "a|b", "\\end{table}", "$x_1$", "{{7*7}}", "x" * 250),
)
COLUMNS = {"name": "arm", "backbone": "backbone", "reducer": "reducer", "adapter": "adapter", "eviction": "eviction"}


def report(
    draw: random.Random, place: Place, spoilt: Spoilt, files: Files | None = None,
    compared: tuple[str, ...] = ("tables",), reference: Reference | None = None,
) -> Case:  # fmt: skip
    formats = ("", " --format csv", *([] if reference else [" --format html,markdown", " --format latex"]))
    text = f"report results --out tables{draw.choice(formats)}"
    case = read_by(place, text, spoilt, ("tables",), compared, files)
    assert case.reference is not None
    right = both(reference or case.reference, lambda answer: table_fault(place.work / "tables"))
    return Case(case.what, case.act, case.expect, case.writes, reference=right)


def make(draw: random.Random, place: Place) -> Case:
    kind = draw.choice("records records records manifest manifest names scores records line file whole".split())
    if kind == "scores":
        path = place.copy("scores.json")
        place.copy("run/adapter", "adapter")
        return read_by(place, "export adapter out --metrics scores.json", SCORES.spoil(draw, path), ("out",))
    folder = place.copy("results")
    cell = draw.choice(sorted(path.parent for path in folder.rglob("manifest.json")))
    samples = next(cell.glob("samples-*.jsonl"))
    if kind == "names":
        return names(draw, place, cell / "manifest.json")
    if kind == "line":
        return spoilt_lines(draw, place, samples)
    if kind == "file":
        return other_file(draw, place, cell, samples)
    if kind == "whole":
        return report(draw, place, ("whole", Expect.TAKEN))
    document, path = (RECORDS, samples) if kind == "records" else (MANIFEST, cell / "manifest.json")
    what, expect = document.spoil(draw, path)
    return report(draw, place, (f"{kind}: {what}", expect))


def names(draw: random.Random, place: Place, path: Path) -> Case:
    field, value = draw.choice(("name", *COLUMNS)), draw.choice((*MARKUP, *NAMES))
    arm = path.parent.parent.name.removesuffix("-seed0")
    named = file_name(value)
    if field == "name" and named:
        target = path.parent.parent.with_name(value)
        path.parent.parent.rename(target)
        path = target / path.parent.name / path.name
    for manifest in path.parent.parent.glob("*/manifest.json"):
        other = json.loads(manifest.read_text())
        other["arm"][field] = value
        manifest.write_text(json.dumps(other))
    seen = value.strip() != "" and (field != "eviction" or not value[0].isspace())  # an eviction begins with its name
    right = named if field == "name" else seen and value != "\ud800" and field != "reducer"  # known ones alone
    spoilt = f"{field} is {shown(value)}", Expect.TAKEN if right else Expect.REFUSED
    return report(draw, place, spoilt, reference=renamed(place, COLUMNS[field], arm, value))


def file_name(value: str) -> bool:
    whole = value.strip(". ") != "" and not set(value) & set("/\\") and value.isprintable()
    return whole and len(value.encode("utf-8", "surrogatepass")) <= 200


def renamed(place: Place, column: str, arm: str, after: str) -> Reference:
    """The table is the originals', with one name in the place of another, marked as text where a spreadsheet counts."""

    def difference(answer: Answer) -> str | None:
        twin = place.root / "twin"
        assert command([*place.words("report {pool}/results --format csv --out"), str(twin)]).code == 0
        right = table_rows(twin / "report.csv")
        shutil.rmtree(twin)
        shown_name = "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in after)
        for row in right:
            row[column] = shown_name if row["arm"] == arm else row[column]
        both_tables = (table_rows(place.work / "tables/report.csv"), right)
        order = [
            sorted(json.dumps({**row, column: row[column].removeprefix("'")}) for row in each) for each in both_tables
        ]
        first = next((f"{mine} is not {other}" for mine, other in zip(*order, strict=False) if mine != other), None)
        return first or (None if len(order[0]) == len(right) else f"{len(order[0])} rows, not {len(right)}")

    return difference


def table_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def table_fault(folder: Path) -> str | None:
    for path in folder.glob("*.csv"):
        with path.open(newline="", encoding="utf-8") as file:
            cells = [text for row in csv.reader(file) for text in row]
        odd = [text for text in cells if text.startswith(("=", "+", "@", "-", "\t", "\r")) and text != "-"]
        runs = [
            text for text in odd if not re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|[+-]?(nan|inf)", text, re.I)
        ]
        if runs:
            return f"{path.name} holds the cell {runs[0][:60]!r}"
    scripts = [path.name for path in folder.glob("*.html") if "<script>alert" in path.read_text(encoding="utf-8")]
    return f"{scripts[0]} holds a script" if scripts else None


def spoilt_lines(draw: random.Random, place: Place, path: Path) -> Case:
    content, what, expect = _spoilt_lines(draw, path.read_bytes())
    complete = _complete(content)
    path.write_bytes(content)
    if draw.random() < 0.7:
        return report(draw, place, (f"records: {what}", expect), files={str(path.relative_to(place.work)): complete})
    from subtoken_train.evaluation.results import read_samples

    def reference(answer: Answer) -> str | None:
        got = read_samples(path.parent)
        path.write_bytes(complete)
        return None if got == read_samples(path.parent) else "other samples than the whole lines hold"

    return Case(f"read_samples {what}", lambda: read_samples(path.parent), expect, reference=reference)


def _spoilt_lines(draw: random.Random, whole: bytes) -> tuple[bytes, str, Expect]:
    """Damage of which the right answer is known; records have no sum, so another number or text is not seen."""
    records = grammar.parsed_lines(whole)
    for _ in range(grammar.TRIES):
        content, what = damaged(draw, whole)
        complete = _complete(content)
        try:
            found = grammar.parsed_lines(complete)
        except grammar.NoDocument:
            return content, what, Expect.REFUSED
        if not all(map(bytes.strip, complete.split(b"\n")[:-1])):  # a line without a record is none
            return content, what, Expect.REFUSED
        if found == records[: len(found)]:
            return content, what, Expect.TAKEN
        if len(found) == len(records) and RECORDS.form.right(records, found) is Expect.REFUSED:
            return content, what, Expect.REFUSED
    raise AssertionError("nothing is known of these lines")


def _complete(content: bytes) -> bytes:
    return content[: content.rfind(b"\n") + 1]


def other_file(draw: random.Random, place: Place, folder: Path, samples: Path) -> Case:
    path = draw.choice((folder / "manifest.json", samples, folder, folder.parent))
    inner = path in (folder, folder.parent)
    kind = no_file(draw, path)
    if inner:
        shutil.rmtree(path.with_name(f"{path.name}-away"))
    traceless = inner or (path == samples and kind == "absent")
    gone = folder.parent if path == folder.parent else folder
    expect = Expect.TAKEN if traceless else Expect.REFUSED
    compared = ("tables",) if inner else ("tables/report.csv",)  # the page says that a task was begun
    files = {str(gone.relative_to(place.work)): None}
    return report(draw, place, (f"{path.name}: {kind}", expect), files=files, compared=compared)
