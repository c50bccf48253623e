"""Data of one's own: records to train on, folders for ``init``, prompts, and fields that change what is learnt."""

import json
import random
import re
from pathlib import Path
from typing import Any

import yaml

from tests.hostile import grammar
from tests.hostile.case import VLM, Answer, Case, Expect, Place, Reference, Spoilt, both, command, made, read_by, same
from tests.hostile.recipes import TENSORS, read, with_key
from tests.hostile.values import PLAIN, lines, nested, no_file, shown, written

TURNS = [{"from": "human", "value": "<image>\nwhat ?"}, {"from": "gpt", "value": "yes"}]
OUTSIDE = (  # image names that mean nothing below the folder, or something outside of it
    *("../../beside/notes.txt", "../secret.png", "/etc/passwd", "dev/../../secret.png", "~/x.png"),
    *("\x00", "a" * 5000, "", ".", "dev"),
)


def marked_lines(content: bytes) -> list[Any]:
    """Lines of JSON; files that were put together may begin each with a mark of its own."""
    return [grammar.parsed_marked(line) for line in content.split(b"\n") if line.strip()]


MARKED_LINES = grammar.LINES._replace(parse=marked_lines)
NO_ANSWER = ("", " ", "\n\t", "\x00", "\u200b", "\ufeff", "\u2060\u200d", "yes\x00")
RECORDS = grammar.Document(
    grammar.Format(
        legal={
            "*.id": lambda value: isinstance(value, str) or type(value) is int,
            "*.kind *.conversations.*.value": grammar.is_text, "*.image": lambda value: isinstance(value, str | list),
            "*.conversations.*.from": lambda value: value in ("human", "gpt"),
        },
        unsaid=("*.id", "*.kind", "*.kind.*", "*.*", "*.conversations.*.*"),
    ),
    {
        "*.conversations": (
            *([], [[]], [5], [{}], TURNS[:1], TURNS[1:]),
            [{"from": "human", "value": "<image><image>\nwhat ?"}, TURNS[1]],
        ),
        "*.conversations.0": ({}, {"from": "human"}, {"value": "x"}),
        "*.conversations.0.from": ("gpt", "system", "Human"),
        "*.conversations.0.value": ("no picture", "<image><image>", ""),
        "*.conversations.1.value": ("<image>", *NO_ANSWER), "*.conversations.1.from": ("human",),
        "*.image": ({}, [5], [None], [[]], ["a", "b"]),
    },
    "odd odd odd changed changed changed bytes bytes whole file", grammar.MARKED,
)  # fmt: skip


def spoilt_records(draw: random.Random, kind: str, path: Path, rows: Any) -> Spoilt:
    notation = MARKED_LINES if path.suffix == ".jsonl" else grammar.MARKED
    what, expect = kind, Expect.REFUSED
    if kind == "outside":  # seen once it is opened
        rows[0]["image"] = draw.choice(OUTSIDE)
        what = f"image is {shown(rows[0]['image'])}"
    elif kind == "names":
        key, value = draw.choice(("id", "kind")), draw.choice(PLAIN)
        rows[draw.randrange(len(rows))][key] = value
        what, expect = f"{key} is {shown(value)}", Expect.TAKEN
    elif kind == "other content":
        rows = draw.choice(([], {}, None, 5, "x", [5], [None], [[]], {"data": rows}, nested(3000, True)))
    path.write_text(notation.write(rows, draw))
    if kind == "document":
        return grammar.Document(RECORDS.form, RECORDS.odd, RECORDS.ways, notation).spoil(draw, path)
    return what, expect


def data_files(draw: random.Random, place: Place) -> Case:
    place.copy("scenes")
    place.copy("images/a.png", "secret.png")
    path = place.work / "scenes/train.json"
    rows = json.loads(path.read_text())
    whole_rows, picture = json.loads(path.read_text()), place.work / "scenes" / rows[0]["image"]
    kind = draw.choice((*["document"] * 9, "outside", "outside", "names", "other content", "image"))
    if kind != "other content" and draw.random() < 0.3:
        path = path.with_suffix(".jsonl")
    what, expect = spoilt_records(draw, kind, path, rows)
    if kind == "image":
        what = f"image: {no_file(draw, picture)}"
    ways = ["library", "fit", *([] if kind == "names" else ["evaluate"])]
    ways += [] if kind in ("names", "image") else ["images"]  # a listing does not see that
    ways += [] if kind in ("outside", "image", "names") else ["check", "preview"]
    way, file = draw.choice(ways), f"scenes/{path.name}"
    if way == "library":
        reference = made(lambda: expected(path))
        return Case(f"InstructionRecords {what}", lambda: records(path), expect, reference=reference)
    files: dict[str, str | bytes | None] = {file: lines(whole_rows) if path.suffix == ".jsonl" else written(whole_rows)}
    if way == "images":
        return read_by(place, f"data images --file {file} --root scenes", (what, expect), files=files)
    if way == "evaluate":
        text = f"evaluate --adapter {{vlm}} --data {file} --max-new-tokens 1"
        return read_by(place, text, (what, expect), files=files)
    files["recipe.yaml"] = yaml.safe_dump(with_key(read(place, VLM), "data.train_file", file))
    place.write("recipe.yaml", str(files["recipe.yaml"]))
    text = f"{way} --config recipe.yaml" + {"preview": " --count 8", "fit": " --trainer.max_steps=4"}.get(way, "")
    run = ("run",) if way == "fit" else ()
    # an image that cannot be opened ends a training that has begun, whose logs stay and are named
    anyway = run if kind == "image" else ()
    return read_by(place, text, (what, expect), run, TENSORS if run else (), files, anyway)


def expected(path: Path) -> list[tuple[str, list[str], list[tuple[str, str]], Any]]:
    rows = (marked_lines if path.suffix == ".jsonl" else grammar.parsed_marked)(path.read_bytes())
    turns = [tuple(turn["value"] for turn in row["conversations"][:2]) for row in rows]
    return [
        (str(row["id"]), [str(path.parent / row["image"])], [pair], row.get("kind"))
        for row, pair in zip(rows, turns, strict=True)
    ]


def records(path: Path) -> list[Any]:
    from subtoken_train.datasets.image_sources import open_image
    from subtoken_train.datasets.records import InstructionRecords

    found, read = InstructionRecords(path), []
    for record in (found[index] for index in range(len(found))):
        for image in record.images:
            open_image(image, record.id)
        turns = [(turn.prompt, turn.answer) for turn in record.turns]
        read.append((record.id, [str(each) for each in record.images], turns, record.kind))
    return read


HEADERS = ("a,b,c", "image,question", "image,question,image", "", ",,")
MADE = "mine_subtoken"
MESSAGES = grammar.Format(
    legal={
        "*.messages.*.role": lambda value: value in ("user", "assistant", "system"),
        "*.messages.*.content": lambda value: isinstance(value, str | list),
        "*.messages.*.content.* *.images.*": lambda value: isinstance(value, str | dict),
        "*.messages.*.content.*.text": grammar.is_text,
        "*.images": lambda value: isinstance(value, str | list | dict),
    },
    unsaid=("*.*", "*.messages.*.*", "*.messages.*.content.*.*", "*.messages.*.content.*", "*.messages.*", "*"),
)
OPTIONS = {
    "--image-column": ("", "nope", "../beside", "\x1b[31m"), "--question-column": ("nope", "/"),
    "--answer-column": ("nope", "a/b/c"), "--table": ("nope", "../beside", "/"),
    "--backbone": ("nope", "../beside", "mine"), "--out": ("../beside", "mine", "/"), "--seed": ("-1", "nope", ""),
}  # fmt: skip


def csv_text(rows: list[list[str]], header: str = "image,question,answer") -> bytes:
    cells = [",".join('"' + text.replace('"', '""') + '"' for text in row) for row in rows]
    return ("\n".join([header, *cells]) + "\n").encode("utf-8", "surrogatepass")


def csv_table(draw: random.Random, path: Path, names: list[str]) -> tuple[Spoilt, bytes]:
    rows = [[name, f"list {i} .", "none"] for i, name in enumerate(names)]
    whole = csv_text(rows)
    kind = draw.choice(("header", "cell", "no text", "outside", "bytes", "bytes", "whole"))
    path.write_bytes(whole)
    if kind in ("bytes", "whole"):
        return grammar.Document(notation=grammar.CSV).spoil(draw, path, kind), whole
    if kind == "header":
        header = draw.choice(HEADERS)
        path.write_bytes(csv_text(rows, header))
        return (f"header {header!r}", Expect.REFUSED), whole
    where = (0, 0) if kind == "outside" else (draw.randrange(len(rows)), draw.choice((1, 2)))
    values = {"cell": PLAIN, "outside": OUTSIDE}.get(kind, ("", " ", "\x00", "\u200b", "\ufeff"))
    rows[where[0]][where[1]] = draw.choice(values)
    kind = f"{kind}: {shown(rows[where[0]][where[1]])}"
    path.write_bytes(content := csv_text(rows))
    if kind.startswith("cell"):
        return (kind, Expect.TAKEN), content
    return (kind, Expect.REFUSED), whole


def json_table(draw: random.Random, path: Path, names: list[str]) -> tuple[Spoilt, bytes]:
    said = [[{"type": "image"}, {"type": "text", "text": f"list {i} ."}] for i in range(len(names))]
    answer = {"role": "assistant", "content": "none"}
    pairs = zip(names, said, strict=True)
    rows = [{"images": [name], "messages": [{"role": "user", "content": each}, answer]} for name, each in pairs]
    path.write_bytes(whole := written(rows).encode())
    document = grammar.Document(MESSAGES, notation=grammar.MARKED)
    return document.spoil(draw, path, "changed changed changed bytes whole"), whole


TABLES = {"q.csv": csv_table, "q.json": json_table}


def own_folders(draw: random.Random, place: Place) -> Case:
    place.copy("images/a.png", "secret.png")
    name = draw.choice(("q.csv", "q.csv", "q.json", "q.txt"))
    picture = (place.pool / "images/a.png").read_bytes()
    names = [] if name == "q.txt" else [f"images/{number}.png" for number in range(4)]
    files: dict[str, str | bytes | None] = {f"mine/{each}": picture + bytes([i]) for i, each in enumerate(names)}
    for each, content in files.items():
        place.write(each, content or b"")
    path = place.path(f"mine/{name}")
    if name == "q.txt":
        path.write_bytes(whole := "\n\n".join(f"paragraph {i} says {'so ' * 60}" for i in range(60)).encode())
        what, expect = grammar.Document(notation=grammar.TEXT).spoil(draw, path, "bytes")
    else:
        (what, expect), whole = TABLES[name](draw, path, names)
    files[f"mine/{name}"] = whole
    words = ["init", "mine"]
    kind = draw.choice(("", "", "", "", "file", "target", "option", "second", "image"))
    if kind == "file":
        what = f"{name}: {no_file(draw, path)}"
    elif kind == "image" and names:
        what = f"an image: {no_file(draw, place.work / 'mine' / names[0])}"
    elif kind == "target":
        place.write(f"{MADE}/thesis.txt", "a year of work")
        words += draw.choice(([], ["--overwrite"]))
        what = f"a target that is somebody's, {words[2:]}"
    elif kind == "option":
        option = draw.choice(list(OPTIONS))
        words.append(f"{option}={draw.choice(OPTIONS[option])}")
        what = f"{what}, {words[-1]!r}"
    elif kind == "second" and names:
        place.write("mine/other.json", '[{"question": "a", "answer": "b"}]')
        what = f"two tables, {what}"
    else:
        kind = ""
    reference = same(place, words, [MADE], files)
    if name == "q.csv":
        reference = both(reference, exactly(place, whole))
    return Case(f"init: {what}", words, Expect.REFUSED if kind else expect, (MADE,), reference=reference)


def exactly(place: Place, table: bytes) -> Reference:
    def difference(answer: Answer) -> str | None:
        paths = [path for path in (place.work / MADE).glob("*.json") if not path.name.startswith(".")]
        said = [(row["image"], *row["conversations"]) for path in paths for row in json.loads(path.read_text())]
        rows = sorted((name, ask["value"].removeprefix("<image>\n"), reply["value"]) for name, ask, reply in said)
        right = sorted(tuple(row) for row in grammar.parsed_csv(table)[1:])
        return None if rows == right else f"{rows[:2]} is not {right[:2]}"[:400]

    return difference


PROMPTS = grammar.Document(
    grammar.Format(
        legal={
            "*.prompt": lambda value: isinstance(value, str) and bool(value.strip()),
            "*.id": lambda value: isinstance(value, str) or type(value) is int,
            "*.image": lambda value: isinstance(value, str | list),
        },
        unsaid=("*.id", "*.image"),
    ),
    {
        "0.prompt": (5, None, [], {}, "", " ", "\n", "\ud800"), "0.id": ([], {}, "b", True, 1.5),
        "0.temperature": (1,), "0.system": ("x",), "0.messages": ([],),
    },
    "odd odd changed bytes bytes file whole",
    grammar.LINES,
)  # fmt: skip
OF_IMAGES = {
    "0.images": (5, [5], ["nowhere.png"]),
    "0.image": (5, {}, True, *(name for name in OUTSIDE if name not in ("", "dev"))),
}


def prompt_files(draw: random.Random, place: Place) -> Case:
    vision = draw.random() < 0.5
    for name in ("a.png", "../secret.png"):
        place.copy("images/a.png", name)
    picture = {"image": "a.png"} if vision else {}
    rows: list[dict[str, Any]] = [{"id": name, "prompt": f"what is at {name} ?", **picture} for name in ("a", "b", "c")]
    kind, expect = draw.choice((*["document"] * 7, "names", "begun")), Expect.REFUSED
    if kind == "names":
        rows[1]["id"] = draw.choice([name for name in PLAIN if "<image>" not in name])
    path = place.write("asked.jsonl", whole := lines(rows))
    if kind == "document":
        odd = {**PROMPTS.odd, **(OF_IMAGES if vision else {})}
        what, expect = grammar.Document(PROMPTS.form, odd, PROMPTS.ways, grammar.LINES).spoil(draw, path)
    elif kind == "names":
        what, expect = f"id is {shown(rows[1]['id'])}", Expect.TAKEN
    else:
        what = "an output that somebody else has begun"
        place.write("out.jsonl", '{"id": "a", "answer": "mine"}\n')
    text = f"generate --adapter {{{'vlm' if vision else 'lm'}}} --prompts asked.jsonl --output out.jsonl"
    text += f" --max-new-tokens 2 --batch-size {draw.choice('12')}"
    writes = ("out.jsonl", "out.jsonl.records")
    return read_by(place, text, (what, expect), writes, ("out.jsonl",), {"asked.jsonl": whole})


ON, OFF = (True, 1, 1.0), (False, 0, 0.0)
SWITCHES = ("loss", "trainable", "train", "weight", "loss_weight", "training")
LABELS = ("label", "kto_tag", "labels")
NEITHER = (0.5, 2, -1, "no", "maybe", [1, 0], {"a": 1})
REFUSED: dict[str, tuple[Any, ...]] = {
    "label": (False, 0, "bad"), "kto_tag": (False,), "videos": (["a.mp4"], [["a.png"]]), "video": ("a.mp4",),
    "objects": ([{"bbox": [1, 2, 3, 4]}],), "bbox": ([1, 2, 3, 4],), "masks": (["a.png"],), "audio": ("a.wav",),
    "audios": (["a.wav"],), "chosen": ("yes",), "rejected": ("no",), "rejected_response": ("no",),
    "tools": ([{"name": "search"}],), "labels": ([1, 2, 3],), "input_ids": ([1, 2, 3],),
    "completion_mask": ([0, 1],), "image_url": ("a.png",), "image_paths": (["a.png"],), "my_image": ("a.png",),
    "mask_history": (True,), "history": ([["a", "b"]],),
}  # fmt: skip
"""Fields of a record that some trainer reads, or that are called like a medium or a mask."""
OF_MESSAGE: dict[str, tuple[Any, ...]] = {
    "tool_calls": ([{"name": "search"}],), "images": (["a.png"],), "reasoning_content": ("since it is so",),
    "token_weights": ([0, 1],), "audio": ("a.wav",),
}  # fmt: skip
NOTES = ("source", "dataset", "model", "license", "width", "category", "tags")
ASKED, ANSWERS = ("is there a 2 ?", "what is at A1 ?", "how many white ?"), ("yes", "red 8", "3")


def conversation(draw: random.Random) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    for number in range(draw.choice((1, 2, 2, 3))):
        mark = "" if number else "<image>\n"
        turns += [{"from": "human", "value": f"{mark}{ASKED[number]}"}, {"from": "gpt", "value": ANSWERS[number]}]
    return turns


def switched(draw: random.Random, turns: list[dict[str, Any]]) -> tuple[Spoilt, dict[str, Any], list[bool]]:
    """What was done and must come of it, fields of the record, and which answers are learnt."""
    answers = turns[1::2]
    kind = draw.choice((*["obeyed"] * 3, "odd", *["refused"] * 3, "nothing", "nothing"))
    name, other = draw.sample(SWITCHES, 2)
    if kind == "obeyed":  # answers that are read and not learnt; one of them is learnt
        learnt = [draw.random() < 0.5 for _ in answers]
        learnt[draw.randrange(len(learnt))] = True
        for turn, each in zip(answers, learnt, strict=True):
            if not each or draw.random() < 0.5:
                turn[name] = draw.choice(ON if each else OFF)
        return (f"{name}: {learnt}", Expect.TAKEN), {}, learnt
    if kind == "nothing":  # empty, true where true is the rule, or a note
        name, value = draw.choice((
            (draw.choice([each for each in REFUSED if each not in LABELS]), draw.choice((None, "", [], {}))),
            (draw.choice(NOTES), draw.choice(("x", 3, ["a"]))),
        ))  # fmt: skip
        return (f"{name} is {value!r}", Expect.TAKEN), {name: value}, [True] * len(answers)
    if kind == "odd":  # neither on nor off, or two that contradict each other
        odd = {name: True, other: False} if draw.random() < 0.3 else {name: draw.choice(NEITHER)}
        draw.choice(answers).update(odd)
        return (f"a message's {odd}", Expect.REFUSED), {}, []
    table = draw.choice((REFUSED, REFUSED, OF_MESSAGE))  # it changes what is learnt or seen, and is not read
    name = draw.choice(list(table))
    field = {name: draw.choice(table[name])}
    if table is OF_MESSAGE:
        draw.choice(answers).update(field)
        return (f"a message's {field}", Expect.REFUSED), {}, []
    return (f"{field}", Expect.REFUSED), field, []


def switches(draw: random.Random, place: Place) -> Case:
    turns = conversation(draw)
    plain = json.loads(json.dumps(turns))
    spoilt, fields, learnt = switched(draw, turns)
    form = draw.choice(("messages", "messages", "conversations", "conversations", "conversations"))
    place.copy("images/a.png", "a.png")

    def record(said: list[dict[str, Any]], more: dict[str, Any]) -> str:
        body = {form: said}
        if form == "messages":  # as OpenAI writes one
            names, roles = {"from": "role", "value": "content"}, {"human": "user", "gpt": "assistant"}
            body = {form: [{names.get(key, key): roles.get(turn[key], turn[key]) if key == "from" else turn[key]
                            for key in turn} for turn in said]}  # fmt: skip
        return json.dumps([{"id": "one", "image": "a.png", **body, **more}] * 2)

    place.write("data.json", record(turns, fields))
    recipe = yaml.safe_dump(with_key(read(place, VLM), "data.train_file", "data.json"))
    place.write("recipe.yaml", recipe)
    way = draw.choice(("preview", "preview", "preview", "fit"))
    words = [way, "--config", "recipe.yaml", *(["--count", "1"] if way == "preview" else [])]
    writes = ("run",) if way == "fit" else ()
    reference = same(place, words, TENSORS if writes else (), {"recipe.yaml": recipe, "data.json": record(plain, {})})
    shown_labels = labels(learnt) if way == "preview" else labels_of_fit(place, recipe, learnt)
    if not all(learnt):
        reference = shown_labels
    elif way == "preview":
        reference = both(reference, shown_labels)
    return Case(f"{way}: {spoilt[0]}", words, spoilt[1], writes, reference=reference)


def labels(learnt: list[bool]) -> Reference:
    def difference(answer: Answer) -> str | None:
        rows = re.findall(r"(?m)^ +answer +(trained|masked) +\d+ +(.*)$", answer.out)
        got = [text.replace("</s>", "").strip() for state, text in rows if state == "trained"]
        right = [text for text, each in zip(ANSWERS, learnt, strict=False) if each]
        return None if got == right else f"trains {got}, not {right}"

    return difference


def labels_of_fit(place: Place, recipe: str, learnt: list[bool]) -> Reference:
    """What was trained on is what the preview of the same file shows."""

    def difference(answer: Answer) -> str | None:
        again = str(place.write("again.yaml", recipe.replace("data.json", str(place.work / "data.json"))))
        return labels(learnt)(command(["preview", "--config", again, "--count", "1"]))

    return difference
