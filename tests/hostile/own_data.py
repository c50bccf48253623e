"""Records to train on, folders for ``init``, prompts, benchmarks' files, results and the tables of these."""

import csv
import json
import random
import re
from pathlib import Path
from typing import Any

from tests.hostile import grammar
from tests.hostile.case import Case, Expect, Place, Reference, Spoilt, read_by
from tests.hostile.models import Make, Spoil, files, inside, of, one_of, reading, whole

TURNS = [{"from": "human", "value": "<image>\nwhat ?"}, {"from": "gpt", "value": "yes"}]
OUTSIDE = (  # image names that mean nothing below the folder, or something outside of it
    *("../../beside/notes.txt", "../secret.png", "/etc/passwd", "dev/../../secret.png", "~/x.png"),
    *("\x00", "a" * 5000, "", ".", "dev"),
)
NO_ANSWER = ("", " ", "\n\t", "\x00", "\u200b", "\ufeff", "\u2060\u200d", "yes\x00")
OF_RECORDS = {
    "*.conversations": (
        *([], [[]], [5], [{}], TURNS[:1], TURNS[1:]),
        [{"from": "human", "value": "<image><image>\nwhat ?"}, TURNS[1]],
    ),
    "*.conversations.0": ({}, {"from": "human"}, {"value": "x"}),
    "*.conversations.0.from": ("gpt", "system", "Human"),
    "*.conversations.0.value": ("no picture", "<image><image>", ""),
    "*.conversations.1.value": ("<image>", *NO_ANSWER), "*.conversations.1.from": ("human",),
    "*.image": ({}, [5], [None], [[]], ["a", "b"]),
}  # fmt: skip
OTHER_CONTENT: tuple[Any, ...] = ([], {}, None, 5, "x", [5], [None], [[]], grammar.nested(3000, True))
REFUSED_IMAGE, NAMED = {"0.image": OUTSIDE}, {"*.id *.kind": grammar.PLAIN}


def other_content(draw: random.Random, path: Path) -> Spoilt:
    path.write_text(grammar.written(content := draw.choice(OTHER_CONTENT)))
    return f"the whole of it is {grammar.shown(content)}" if content != OTHER_CONTENT[
        -1
    ] else "lists 3000 deep", Expect.REFUSED


def named(notation: grammar.Notation) -> Spoil:
    def spoil(draw: random.Random, path: Path) -> Spoilt:
        content, what, _ = grammar.Document(NAMED, notation=notation).spoilt(draw, path.read_bytes(), "odd")
        path.write_bytes(content)
        return what, Expect.TAKEN

    return spoil


def records(name: str, notation: grammar.Notation) -> Make:
    document = grammar.Document(
        OF_RECORDS, loose="*.id *.image", open="*.* *.conversations.*.*", notation=notation,
        ways="odd odd odd changed changed changed bytes bytes whole file",
    )  # fmt: skip
    train = f"--config {{recipe}} --data.train_file=scenes/{name}"
    prepared = (f"check {train}", f"preview {train} --count 8", f"fit {train} --trainer.max_steps=4")
    listed = f"data images --file scenes/{name} --root scenes"
    asked = f"evaluate --adapter {{vlm}} --data scenes/{name} --max-new-tokens 1"
    within = grammar.Document(REFUSED_IMAGE, notation=notation)
    spoils = (*(of(document, name),) * 5, *([inside(name, other_content)] if notation is grammar.MARKED else []))
    return one_of(
        *(reading("scenes", "scenes", spoils, *prepared, listed, asked),) * 8,
        reading("scenes", "scenes", [of(within, name, "odd")], listed, asked),
        reading("scenes", "scenes", [inside(name, named(notation))], prepared[-1]),
        reading("scenes", "scenes", [files("train/000000.jpg")], asked),
    )


data_files = one_of(
    records("train.json", grammar.MARKED),
    records("train.json", grammar.MARKED),
    records("train.jsonl", grammar.MARKED_LINES),
)


def csv_text(draw: random.Random, path: Path) -> Spoilt:
    """A header that names no column, a picture from elsewhere, a question or an answer without a text."""
    header, *rows = path.read_text().splitlines()
    kind, row = draw.choice(("header", "image", "text")), draw.randrange(len(rows))
    if kind == "header":
        header = what = draw.choice(("a,b,c", "image,question", "image,question,image", "", ",,"))
    else:
        cells, column = rows[row].split(","), 0 if kind == "image" else draw.choice((1, 2))
        what = draw.choice(OUTSIDE if kind == "image" else ("", " ", "\x00", "\u200b", "\ufeff"))
        cells[column] = f'"{what}"'
        rows[row] = ",".join(cells)
    path.write_text("\n".join((header, *rows, "")))
    return f"{kind} {grammar.shown(what)}", Expect.REFUSED


def second_table(draw: random.Random, folder: Path) -> Spoilt:
    (folder / "other.json").write_text('[{"question": "a", "answer": "b"}]')
    return "two tables", Expect.REFUSED


def taken_target(draw: random.Random, folder: Path) -> Spoilt:
    target = folder.with_name("mine_subtoken")
    target.mkdir()
    (target / "thesis.txt").write_text("a year of work")
    return "a target that is somebody's", Expect.REFUSED


MESSAGES = grammar.Document(
    loose="* *.images *.images.* *.messages.*.content *.messages.*.content.*",
    open="*.* *.messages.*.* *.messages.*.content.*.*",
    ways="changed changed changed bytes whole",
    notation=grammar.MARKED,
)
OF_FOLDER = (second_table, taken_target)
OPTIONS = [
    reading(f"own_{suffix}", "mine", [lambda draw, path: ("with an option", Expect.REFUSED)], f"init mine {option}")
    for suffix in ("csv", "json")
    for option in ("--table=nope --table=../beside --table=/ --backbone=nope --backbone=../beside --backbone=mine "
                   "--out=../beside --out=mine --out=/ --seed=-1 --seed=nope --seed=").split()
] + [
    reading("own_csv", "mine", [lambda draw, path: ("with a column", Expect.REFUSED)], f"init mine {option}")
    for option in ("--image-column=nope --image-column=../beside --image-column= --question-column=nope "
                   "--question-column=/ --answer-column=nope --answer-column=a/b/c").split()
]  # fmt: skip

OWN = {
    "own_csv": (
        of(grammar.Document(notation=grammar.CSV), "q.csv", "bytes"), *(inside("q.csv", csv_text),) * 2,
        files("q.csv", "images/0.png"), *OF_FOLDER, whole,
    ),
    "own_json": (*(of(MESSAGES, "q.json"),) * 3, files("q.json", "images/0.png"), *OF_FOLDER),
    "own_txt": (of(grammar.Document(notation=grammar.TEXT), "q.txt", "bytes"), taken_target, whole),
}  # fmt: skip
FOLDERS = tuple(reading(original, "mine", spoils, "init mine") for original, spoils in OWN.items())


def own_folders(draw: random.Random, place: Place) -> Case:
    place.copy("images/a.png", "secret.png")
    return draw.choice((*FOLDERS * 2, draw.choice(OPTIONS)))(draw, place)


PROMPTS = {
    "0.prompt": (5, None, [], {}, "", " ", "\n", "\ud800"), "0.id": ([], {}, "b", True, 1.5),
    "0.temperature": (1,), "0.system": ("x",), "0.messages": ([],),
}  # fmt: skip
OF_IMAGES = {
    "0.images": (5, [5], ["nowhere.png"]),
    "0.image": (5, {}, True, *(name for name in OUTSIDE if name not in ("", "dev"))),
}


def prompt_files(draw: random.Random, place: Place) -> Case:
    name = draw.choice(("lm", "vlm"))
    for picture in ("a.png", "../secret.png"):
        place.copy("images/a.png", picture)
    odd = PROMPTS if name == "lm" else {**PROMPTS, **OF_IMAGES}
    ways = "odd odd changed bytes bytes file whole"
    document = grammar.Document(odd, loose="*.id *.image", ways=ways, notation=grammar.LINES)
    spoilt = document.spoil(draw, place.copy(f"{name}.jsonl", "asked.jsonl"))
    if draw.random() < 0.1:
        place.write("out.jsonl", '{"id": "a", "answer": "mine"}\n')
        spoilt = "an output that somebody else has begun", Expect.REFUSED
    text = f"generate --adapter {{{name}}} --prompts asked.jsonl --output out.jsonl --max-new-tokens 2"
    return read_by(place, f"{text} --batch-size {draw.choice('12')}", spoilt)


POPE = {f"coco_pope_{name}.json": "* *.image *.text *.label" for name in ("adversarial", "random", "popular")}
READ = {  # places of the files that are read, and what stands there is of one kind
    "testdev_balanced_questions.json": "* *.question *.answer",
    "v2_OpenEnded_mscoco_val2014_questions.json": "questions questions.* questions.*.question",
    "v2_mscoco_val2014_annotations.json": "annotations annotations.* annotations.*.answers",
    "TextVQA_0.5.1_val.json": "data data.* data.*.answers", "llava_textvqa_val_v051_ocr.jsonl": "* *.image *.text",
    "pid_splits.json": "test test.*", "problems.json": "* *.question *.choices *.answer", **POPE,
}  # fmt: skip


def benchmark_file(draw: random.Random, path: Path) -> Spoilt:
    ways = "changed changed changed bytes bytes file whole" if path.name in READ else "bytes bytes file whole"
    kind = draw.choice((ways if path.suffix != ".txt" else "bytes bytes whole").split())  # one text of many may be gone
    if path.suffix in (".json", ".jsonl"):
        notation = grammar.LINES if len(path.read_bytes().strip().splitlines()) > 1 else grammar.JSON
        read = READ.get(path.name, "") if kind == "changed" else "nothing"
        return grammar.Document(only=read, open="* *.* *.*.*", notation=notation).spoil(draw, path, kind)
    notation = grammar.PARQUET if path.suffix == ".parquet" else grammar.TEXT
    broken = None if path.suffix == ".tsv" else Expect.REFUSED  # of whose rows a limit looks at two
    return grammar.Document(only="nothing", notation=notation, broken=broken).spoil(draw, path, kind)


def benchmarks(draw: random.Random, place: Place) -> Case:
    layout = draw.choice(("own", "parquet"))
    name = draw.choice(sorted(path.name for path in (place.pool / "benchmarks" / layout).iterdir()))
    folder = place.copy(f"benchmarks/{layout}/{name}", name)
    suffixes = (".json", ".jsonl", ".csv", ".tsv", ".txt", ".parquet")
    path = draw.choice(sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix in suffixes))
    what, expect = benchmark_file(draw, path)
    return read_by(place, f"data {name} --root {name} --limit 2", (f"{path.relative_to(place.work)}: {what}", expect))


def whole_lines(content: bytes) -> list[Any]:
    """Samples as far as they were written; a line without one is none."""
    complete = content[: content.rfind(b"\n") + 1]
    if not all(map(bytes.strip, complete.split(b"\n")[:-1])):
        raise grammar.NoDocument("an empty line")
    return grammar.parsed_lines(complete)


COUNTS = "*.kv_bytes *.dense_kv_bytes *.region_bytes *.entries_before *.new_tokens *.batch_size"
SAMPLES = grammar.Document(
    {COUNTS: (1.5, -1), "*.reference": ({},)},
    loose="*.emptied *.reference.* *.prediction", open="*.* *.*.*",
    ways="odd changed changed changed bytes", notation=grammar.Notation(whole_lines, grammar.LINES.write),
)  # fmt: skip
UNPRINTED = (
    "batch_size max_length dtype processes adapter_sha256 reducer eviction_options calibration_sha256 seed versions"
).split()
MANIFEST = grammar.Document(
    {
        "schema": (99,), "rows": (-1, 1.5), "task": ("nope", "../x", "", "\x1b[31m"),
        "primary arm.protocol": ("nope",), "arm.name": ("", "../x", "a/b", "\x00"), "arm.nominal_kv": (-1,),
        "arm.seed": (1.5,),
    },
    loose="options.*", open="settings.*", free=" ".join(f"settings.{name}" for name in UNPRINTED),
    ways="odd changed changed changed bytes",
)  # fmt: skip
NO_SCORE = (5, {}, [], None, "x", grammar.NAN, [[]], [grammar.NAN, 1, 1, 1], ["x"] * 4, 0)
RIGHT_SCORES: dict[str, tuple[Any, ...]] = {  # by key of a run's scores: which of the odd values are right there
    "kinds": (["x"] * 4,), "scores": (), "measures": ({},), "nominal_kv": (5, 0), "realised_kv": (5, 0),
    "kv_bytes": (5, 0), "dense_kv_bytes": (5,), "arm": ("x",), "data_sha256": ("x",), "data": ("x",),
}  # fmt: skip
SCORES = grammar.Document(
    {f"runs.0.{key}": [each for each in NO_SCORE if each not in right] for key, right in RIGHT_SCORES.items()},
    loose="runs.0.predictions.* runs.0.measures",
    open="* runs.0.* runs.0.measures.*",
    free="runs.0.seconds runs.0.prompts_with_an_emptied_region",
)
MARKUP = (
    *("[red]x[/red]", "[/bold]", "[link=http://x]y", "=cmd|' /C calc'!A0", "+1", "@x", "[bold"),
    *("<script>alert(1)</script>", "a|b", "\\end{table}", "$x_1$", "{{7*7}}", "x" * 250),
)


def cells(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.rglob("manifest.json"))


def sample_lines(draw: random.Random, folder: Path) -> Spoilt:
    return SAMPLES.spoil(draw, next(draw.choice(cells(folder)).glob("samples-*.jsonl")))


def manifest(draw: random.Random, folder: Path) -> Spoilt:
    return MANIFEST.spoil(draw, draw.choice(cells(folder)) / "manifest.json")


def no_manifest(draw: random.Random, folder: Path) -> Spoilt:
    return grammar.no_file(draw, draw.choice(cells(folder)) / "manifest.json"), Expect.REFUSED


def names(draw: random.Random, place: Place) -> Case:
    """A name that acts in a terminal, a spreadsheet or a page is shown as the text that it is."""
    cell, field, name = draw.choice(cells(place.copy("results"))), draw.choice(("backbone", "adapter")), ""
    while not name.isprintable() or not name.strip():
        name = draw.choice((*MARKUP, *grammar.NAMES))
    for path in cell.parent.glob("*/manifest.json"):
        content = json.loads(path.read_text())
        content["arm"][field] = name
        path.write_text(json.dumps(content))
    words = f"report results --out tables --format {draw.choice(('csv', 'html,markdown', 'latex'))}".split()
    reference: Reference = lambda answer: table_fault(place.work / "tables")  # noqa: E731
    return Case(f"{field} is {grammar.shown(name)}", words, Expect.TAKEN, ("tables",), reference=reference)


def table_fault(folder: Path) -> str | None:
    for path in folder.glob("*.csv"):
        with path.open(newline="", encoding="utf-8") as file:
            texts = [text for row in csv.reader(file) for text in row]
        odd = [text for text in texts if text.startswith(("=", "+", "@", "-", "\t", "\r")) and text != "-"]
        number = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|[+-]?(nan|inf)", re.IGNORECASE)
        if runs := [text for text in odd if not number.fullmatch(text)]:
            return f"{path.name} holds the cell {runs[0][:60]!r}"
    scripts = [path.name for path in folder.glob("*.html") if "<script>alert" in path.read_text(encoding="utf-8")]
    return f"{scripts[0]} holds a script" if scripts else None


def scores(draw: random.Random, place: Place) -> Case:
    spoilt = SCORES.spoil(draw, place.copy("scores.json"))
    place.copy("run/adapter", "adapter")
    return read_by(place, "export adapter out --metrics scores.json", spoilt)


results = one_of(
    *(reading(
        "results", "results", (*(sample_lines,) * 4, *(manifest,) * 3, no_manifest, whole),
        *(f"report results --out tables{form}" for form in ("", " --format csv", " --format html,markdown")),
    ),) * 8, names, names, scores, scores,
)  # fmt: skip
