"""Results folders, score files and tables that ``report`` and ``export --metrics`` read."""

from __future__ import annotations

import csv
import json
import random
import shutil
from pathlib import Path
from typing import Any

from tests.hostile.acts import command
from tests.hostile.case import Answer, Case, Expect, Place, Reference
from tests.hostile.known import TRIES, Format, NoDocument, change, damage_or_change, misplaced, parsed_lines
from tests.hostile.references import both, same
from tests.hostile.values import HUGE, INFINITY, NAMES, NAN, changed, damaged, no_file, shown, written

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


def _count(value: Any) -> bool:
    return type(value) is int and value >= 0


OF_RECORD = Format(
    legal={
        **dict.fromkeys(("kv_bytes", "dense_kv_bytes", "region_bytes", "region_dense_bytes", "index_bytes"), _count),
        **dict.fromkeys(("entries_before", "entries_after", "new_tokens", "batch_size", "unread_bytes"), _count),
        "kind": lambda value: value is None or isinstance(value, str),
        "emptied": lambda value: isinstance(value, dict),
        "reference.*": lambda value: True,  # of the task's own kind
        "prediction": lambda value: isinstance(value, str | list),
        "kept_visual": lambda value: isinstance(value, str | None),
    },
    unsaid=("*", "*.*"),
)
OF_RECORDS = Format(
    legal={f"*.{place}": legal for place, legal in OF_RECORD.legal.items()},
    unsaid=("*.reference.*",),  # of the task's own
)
OF_MANIFEST = Format(
    free=("settings.*",),
    legal={
        "arm.adapter": lambda value: isinstance(value, str | None),
        "arm.anchor": lambda value: isinstance(value, str | None),
        "arm.seed": lambda value: value is None or type(value) is int,
        "arm.groups": lambda value: isinstance(value, str | None),
        "expected_rows": lambda value: value is None or type(value) is int,
        "options.*": lambda value: True,  # of the task's own kind
        "source": lambda value: isinstance(value, str | None),
    },
    exact=("schema", "task"),
)
OF_SCORES = Format(
    free=("runs.0.seconds",),
    more=("", "runs.0"),
    legal={
        "runs.0.unread_bytes": _count,
        "runs.0.prompts_with_an_emptied_region": _count,
        "runs.0.predictions.*": lambda value: isinstance(value, str | list),
        "runs.0.measures": lambda value: value == {} or value is None,
        "runs.0.predictions": lambda value: value is None,
    },
    unsaid=("runs.0.*", "runs.0.measures.*"),
)
OF_PAPER = Format(free=("*.*.line",), more=("", "*.*"), unsaid=("*", "*.*", "*.*.*", "*.*.*.*"))
MARKUP = (
    *("[red]x[/red]", "[/bold]", "[link=http://x]y", "=cmd|' /C calc'!A0", "+1", "@x", "[bold"),
    *("<script>alert(1)</script>", "a|b", "\\end{table}", "$x_1$", "{{7*7}}", "x" * 250),
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


def report(
    draw: random.Random,
    place: Place,
    what: str,
    expect: Expect,
    *further: str,
    files: dict[str, str | bytes | None] | None = None,
    compared: tuple[str, ...] = ("tables",),
    reference: Reference | None = None,
) -> Case:
    """``report`` on the results; its tables must be those of the originals, or of what ``files`` make of them."""
    formats = draw.choice(([], ["--format", "csv"], ["--format", "html,markdown"], ["--format", "latex"]))
    if reference is not None:
        formats = draw.choice(([], ["--format", "csv"]))
    words = ["report", "results", "--out", "tables", *formats, *further]
    reference = reference or same(place, words, compared, files)
    return Case(f"report {what}", words, expect, ("tables",), reference=both(reference, harmless(place)))


def harmless(place: Place) -> Reference:
    """Nothing that a spreadsheet or a browser would run stands in what was written."""
    return lambda answer: table_fault(place.work / "tables")


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
        content, what, expect = change(draw, content, OF_RECORD)
    lines[row] = written(content)
    path.write_text("\n".join(lines) + "\n", errors="surrogatepass")
    return report(draw, place, f"record: {what}", expect)


def manifest(draw: random.Random, place: Place) -> Case:
    """A manifest with a field that cannot be."""
    path = cell(draw, place) / "manifest.json"
    kind = draw.choice(("invalid", "invalid", "mutated", "damage"))
    if kind == "invalid":
        content, what, expect = misplaced(draw, json.loads(path.read_text()), INVALID_MANIFEST)
        path.write_text(written(content))
    else:
        what, expect = damage_or_change(draw, path, OF_MANIFEST, kind)
    return report(draw, place, f"manifest: {what}", expect)


COLUMNS = {"name": "arm", "backbone": "backbone", "reducer": "reducer", "adapter": "adapter", "eviction": "eviction"}


def names(draw: random.Random, place: Place) -> Case:
    """Names that mean something to a terminal, a spreadsheet, LaTeX or a browser; they must come out as they are."""
    path = cell(draw, place) / "manifest.json"
    field, value = draw.choice(("name", *COLUMNS)), draw.choice((*MARKUP, *NAMES))
    arm = path.parent.parent.name.removesuffix("-seed0")
    named = file_name(value)
    if field == "name" and named:
        target = path.parent.parent.with_name(value)
        path.parent.parent.rename(target)
        path = target / path.parent.name / path.name
    for manifest_file in path.parent.parent.glob("*/manifest.json"):
        other = json.loads(manifest_file.read_text())
        other["arm"][field] = value
        manifest_file.write_text(json.dumps(other))
    seen = value.strip() != "" and (field != "eviction" or not value[0].isspace())  # an eviction begins with its name
    right = named if field == "name" else seen and value != "\ud800" and field != "reducer"  # known ones alone
    reference = renamed(place, COLUMNS[field], arm, value)
    return report(
        draw, place, f"{field} is {shown(value)}", Expect.TAKEN if right else Expect.REFUSED, reference=reference
    )


def file_name(value: str) -> bool:
    """Whether a name may be a folder's: it leads nowhere, is short, and every character of it can be shown."""
    whole = value.strip(". ") != "" and not set(value) & set("/\\") and value.isprintable()
    return whole and len(value.encode("utf-8", "surrogatepass")) <= 200


def renamed(place: Place, column: str, arm: str, after: str) -> Reference:
    """The table is the originals', with one name in the place of another, marked as text where a spreadsheet counts."""

    def difference(answer: Answer) -> str | None:
        rows = table_rows(place.work / "tables/report.csv")
        shown_name = "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in after)
        right = same_rows(place)
        for row in right:
            row[column] = shown_name if row["arm"] == arm else row[column]
        got = [{**row, column: row[column].removeprefix("'")} for row in rows]
        right = [{**row, column: row[column].removeprefix("'")} for row in right]
        order = [sorted(map(json.dumps, each)) for each in (got, right)]
        first = next((f"{mine} is not {other}" for mine, other in zip(*order, strict=False) if mine != other), None)
        return first or (None if len(got) == len(right) else f"{len(got)} rows, not {len(right)}")

    return difference


def same_rows(place: Place) -> list[dict[str, str]]:
    """The rows of the table of the originals."""
    other = place.root / "twin"
    words = ["report", str(place.pool / "results"), "--out", str(other), "--format", "csv"]
    assert command(words).code == 0
    rows = table_rows(other / "report.csv")
    shutil.rmtree(other)
    return rows


def table_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a table in CSV."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def table_fault(folder: Path) -> str | None:
    """What a spreadsheet or a browser would run of the written files."""
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


RIGHT_SCORES: dict[str, tuple[Any, ...]] = {
    **{"kinds": (["x"] * 4,), "scores": (), "measures": ({},), "nominal_kv": (5, 0), "realised_kv": (5, 0)},
    **{"kv_bytes": (5, 0), "dense_kv_bytes": (5,), "arm": ("x",), "data_sha256": ("x",), "data": ("x",)},
}
"""By key of a run's scores: which of the odd values are right there."""


def scores(draw: random.Random, place: Place) -> Case:
    """A file of ``evaluate --out`` that ``export --metrics`` puts on a card."""
    path = place.copy("scores.json")
    place.copy("run/adapter", "adapter")
    content = json.loads(path.read_text())
    expect = Expect.REFUSED
    whole = path.read_text()
    kind = draw.choice(("invalid", "mutated", "damage", "file", "control"))
    if kind == "invalid":
        key = draw.choice(list(RIGHT_SCORES))
        value = draw.choice((5, {}, [], None, "x", NAN, [[]], [NAN, 1, 1, 1], ["x"] * 4, 0))
        if value in RIGHT_SCORES[key]:
            value = NAN
        what = f"{key} is {shown(value)}"
        path.write_text(json.dumps(changed(content, ("runs", 0, key), value)))
    elif kind in ("mutated", "damage"):
        what, expect = damage_or_change(draw, path, OF_SCORES, kind)
    elif kind == "control":
        what, expect = "as evaluate wrote them", Expect.TAKEN
    else:
        what = no_file(draw, path)
    words = ["export", "adapter", "out", "--metrics", "scores.json"]
    reference = same(place, words, ["out"], {"scores.json": whole})
    return Case(f"export --metrics: {what}", words, expect, ("out",), reference=reference)


def paper(draw: random.Random, place: Place) -> Case:
    """Printed tables."""
    place.copy("results")
    path = place.copy("paper.json")
    kind = draw.choice(("mutated", "mutated", "mutated", "damage", "file", "control"))
    if kind in ("mutated", "damage"):
        what, expect = damage_or_change(draw, path, OF_PAPER, kind)
    elif kind == "file":
        what, expect = no_file(draw, path), Expect.REFUSED
    else:
        what, expect = "valid", Expect.TAKEN
    return report(draw, place, f"printed tables: {what}", expect, "--compare-paper", "paper.json")


def line(draw: random.Random, place: Place) -> Case:
    """Lines of records that were cut, doubled or spoilt; by the library's own reader too."""
    path = next(cell(draw, place).glob("samples-*.jsonl"))
    content, what, expect = _spoilt_lines(draw, path.read_bytes())
    complete = _complete(content)
    path.write_bytes(content)
    if draw.random() < 0.3:
        from subtoken_train.evaluation.results import read_samples

        def reference(answer: Answer) -> str | None:
            got = read_samples(path.parent)
            path.write_bytes(complete)
            return None if got == read_samples(path.parent) else "other samples than the whole lines hold"

        return Case(f"read_samples {what}", lambda: read_samples(path.parent), expect, reference=reference)
    files: dict[str, str | bytes | None] = {str(path.relative_to(place.work)): complete}
    return report(draw, place, f"records: {what}", expect, files=files)


def _spoilt_lines(draw: random.Random, whole: bytes) -> tuple[bytes, str, Expect]:
    """Damage of which the right answer is known; records have no sum, so another number or text is not seen."""
    records = parsed_lines(whole)
    for _ in range(TRIES):
        content, what = damaged(draw, whole)
        try:
            found = parsed_lines(_complete(content))
        except NoDocument:
            return content, what, Expect.REFUSED
        if found == records[: len(found)]:
            return content, what, Expect.TAKEN
        if len(found) == len(records) and OF_RECORDS.right(records, found) is Expect.REFUSED:
            return content, what, Expect.REFUSED
    raise AssertionError("nothing is known of these lines")


def _complete(content: bytes) -> bytes:
    """The whole lines; what follows the last end of a line was never finished."""
    return content[: content.rfind(b"\n") + 1]


def other_file(draw: random.Random, place: Place) -> Case:
    """No file where one belongs; what has left no trace at all is not in the table."""
    folder = cell(draw, place)
    samples = next(folder.glob("samples-*.jsonl"))
    path = draw.choice((folder / "manifest.json", samples, folder, folder.parent))
    inner = path in (folder, folder.parent)
    kind = no_file(draw, path)
    if inner:
        shutil.rmtree(path.with_name(f"{path.name}-away"))
    traceless = inner or (path == samples and kind == "absent")
    gone = folder.parent if path == folder.parent else folder
    files: dict[str, str | bytes | None] = {str(gone.relative_to(place.work)): None}
    expect = Expect.TAKEN if traceless else Expect.REFUSED
    compared = ("tables",) if inner else ("tables/report.csv",)  # the page says that a task was begun
    return report(draw, place, f"{path.name}: {kind}", expect, files=files, compared=compared)


def whole(draw: random.Random, place: Place) -> Case:
    """Results as ``evaluate`` left them."""
    place.copy("results")
    return report(draw, place, "whole", Expect.TAKEN)


KINDS = {
    "records": records, "manifest": manifest, "names": names, "scores": scores, "paper": paper, "line": line,
    "file": other_file,
    "control": whole,
}  # fmt: skip
