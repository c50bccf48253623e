"""Outputs that would replace what is not theirs, disks without room, files that come while a command works."""

import random
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.hostile.case import VLM, Case, Expect, Place, content_of, made, read_by, same
from tests.hostile.pool import asked_model
from tests.hostile.recipes import TENSORS, read, with_key

MINE = (
    "thesis.txt logs/mine.txt recipe.yaml a.partial checkpoints/mine.bin adapter/mine.bin "
    "checkpoints/step-1.partial/x data/train.json"
).split()
ADAPTER = ("adapter_model.safetensors", "router.safetensors", "subtoken_config.json", "adapter_config.json")
OVERWRITE = ("", " --overwrite")


def occupy(draw: random.Random, folder: Path) -> str:
    names = draw.sample(MINE, draw.choice((1, 1, 2, 3)))
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"mine: {name}\n")
    return ", ".join(names)


def refused(place: Place, text: str, what: str) -> Case:
    return Case(f"{text[:60]}: {what}", place.words(text), Expect.REFUSED)


def fitted(draw: random.Random, place: Place, kind: str) -> Case:
    recipe, what, flags = read(place, VLM), kind, draw.choice(OVERWRITE)
    if kind == "occupied":
        target = draw.choice(("run", "run", "deep/run"))
        what = f"into a folder with {occupy(draw, place.work / target)}"
        recipe, flags = {**recipe, "output_dir": target}, draw.choice((*OVERWRITE, " --overwrite", " --resume"))
    elif kind == "current":  # in the current folder, in one above it, or where the data are
        what = draw.choice((".", "..", "../beside", "scenes", "./", "run/..", "../work"))
        place.copy("scenes")
        recipe = with_key({**recipe, "output_dir": what}, "data.train_file", "scenes/train.json")
    elif kind == "link":
        (place.work / "run").symlink_to("../beside")
    else:
        place.copy("run")
        recipe, flags = {**recipe, "overwrite": True}, ""
    place.write("r.yaml", yaml.safe_dump(recipe))
    return refused(place, f"fit --config r.yaml{flags}", what)


AGAIN = (
    "model.optimizer.weight_decay=-1 data.num_workers=-1 trainer.accumulate_grad_batches=0 "
    "trainer.gradient_clip_val=nan model.optimizer.learning_rate=nan data.train_file=nowhere.json "
    "model.backbone.path=nowhere/at/all data.seed=3"
).split()


def fitted_again(draw: random.Random, place: Place, kind: str) -> Case:
    """A finished run, with somebody's file in it at times, and a second one that is refused, diverges, or is right."""
    place.copy("run")
    if kind == "foreign":
        place.write("run/thesis.txt", "a year of work\n")
        words = place.words("fit --config {recipe} --overwrite")
        known = [f"run/{name}" for name in ("adapter", "checkpoints", "logs", "recipe.yaml", ".subtoken-run.json")]
        reference = same(place, words, TENSORS)  # and the thesis is still somewhere
        what = "over a run with a thesis in it"
        return Case(f"fit --overwrite {what}", words, Expect.TAKEN, known, moves=(".",), reference=reference)
    extra, flag = draw.choice(AGAIN), draw.choice((*OVERWRITE, " --overwrite"))
    expect = Expect.TAKEN if flag and extra == "data.seed=3" else Expect.REFUSED
    text, writes = f"fit --config {{recipe}} --{extra}{flag}", ("run", "run.1")  # where the old one goes
    return read_by(place, text, (f"again, {extra}", expect), writes, TENSORS)


def exported(draw: random.Random, place: Place, kind: str) -> Case:
    kind = draw.choice(("siblings", "siblings", "folder", "file", "adapter", "link", "itself"))
    adapter, out = place.copy("run/adapter", "adapter"), place.work / "out"
    target, expect, flag = "out", Expect.REFUSED, draw.choice((*OVERWRITE, " --overwrite"))
    writes: list[str] = ["out"]
    if kind == "siblings":
        expect = Expect.TAKEN
        for ending in (".partial", ".replaced", ".old", ".tmp"):
            place.write(f"out{ending}/thesis.txt", "a year of work\n")
    elif kind == "folder":
        occupy(draw, out)
    elif kind == "file":
        place.write("out", "mine\n")
    elif kind == "link":
        out.symlink_to("../beside")
    elif kind == "itself":  # written anew, byte for byte
        target = draw.choice(("adapter", "adapter/", ".", "..", "adapter/x"))
        writes = ["adapter"] if target.strip("/") == "adapter" else []
        expect = Expect.TAKEN if writes and flag else Expect.REFUSED
    else:
        place.copy("run/adapter", "out")
        foreign, flag = draw.random() < 0.5, " --overwrite"
        if foreign:
            place.write("out/thesis.txt", "a year of work\n")
            writes = [f"out/{path.name}" for path in adapter.iterdir()]
        expect = Expect.REFUSED if foreign else Expect.TAKEN
    words = place.words(f"export adapter {target}{flag}")
    reference = same(place, words, [f"{target.strip('/')}/{name}" for name in ADAPTER])
    moves = ("out",) if kind == "adapter" else ()
    return Case(f"export {target}{flag}, {kind}", words, expect, writes, moves=moves, reference=reference)


def made_over(draw: random.Random, place: Place, kind: str) -> Case:
    what = ""
    if kind == "list":
        place.copy("scenes")
        over = draw.choice("diary.txt scenes/train.json scenes/train/000000.jpg ../beside/notes.txt scenes".split())
        text = f"data images --file scenes/train.json --root nowhere --missing-list {over}"
    elif kind == "report":
        place.copy("results")
        what = draw.choice(("tables/report.csv", "tables/report.html", "tables"))
        place.write(what, "mine\n")
        text = "report results --out tables"
    elif kind == "recipe":
        target = draw.choice("diary.txt nowhere/x.yaml diary.txt/x.yaml ../beside/notes.txt".split())
        text = f"recipes copy tiny_lora_only {target}"
    else:
        place.copy("scenes")
        what, image = occupy(draw, place.work / "out"), "scenes/dev/000000.jpg"
        over = draw.choice((image, "diary.txt", "."))
        text = draw.choice((
            f"data {draw.choice(('english', 'samples', 'scenes'))} --out out{draw.choice(OVERWRITE)}",
            "diagnose --adapter {vlm} --data scenes/dev.json --out out",
            "evaluate --adapter {vlm} --data scenes/dev.json --limit 1 --out diary.txt",
            f"generate --adapter {{vlm}} --image {image} --prompt 'what ?' --max-new-tokens 1 --show {over}",
        ))  # fmt: skip
    return refused(place, text, what)


KINDS = (
    *[(fitted, kind) for kind in ("occupied", "occupied", "occupied", "recipe", "current", "current", "link")],
    *[(fitted_again, kind) for kind in ("again", "again", "foreign")], *[(exported, "")] * 3,
    *[(made_over, kind) for kind in ("list", "report", "recipe", "set")],
)  # fmt: skip


def folders(draw: random.Random, place: Place) -> Case:
    make, kind = draw.choice(KINDS)
    return make(draw, place, kind)


ROOM = (0, 40, 2**30)  # bytes that a file may have: none, fewer than any of them takes, and as many as it likes
SHORT = "--max-new-tokens 1"
ONE = "--adapter {vlm} --data {dev} --limit 1"
WRITERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # what it writes, and what it may leave unfinished
    "export {vlm} out": (("out",), ()), f"evaluate {ONE} {SHORT} --out out.json": (("out.json",), ()),
    "evaluate --config {pool}/grid.yaml --out results": (("results",), ("results",)),
    "report {pool}/results --out tables": (("tables",), ()),
    "calibrate prefixkv --backbone {llama} --out made.json --option samples=2 --option context_length=300": (
        ("made.json",), ()),
    f"diagnose {ONE} --out seen": (("seen",), ()),
    "data scenes --out made --train 1 --dev 1 --test 1": (("made",), ()), "init mine": (("mine_subtoken",), ()),
    f"generate --adapter {{vlm}} --image {{png}} --prompt 'what ?' {SHORT} --show kept.png": (("kept.png",), ()),
    f"generate --adapter {{lm}} --prompts asked.jsonl --output out.jsonl {SHORT}": (
        ("out.jsonl", "out.jsonl.records"), ("out.jsonl.records",)),
    "recipes copy tiny_lora_only mine.yaml": (("mine.yaml",), ()),
    "data images --file {dev} --root mine --missing-list absent.txt": ((), ("absent.txt",)),
    "fit --config {recipe}": (("run",), ("run",)),
}  # fmt: skip


@cache
def asked(pool: Path) -> Any:
    model = asked_model(pool, "lm")
    model.ask("Code polya quiet dragon. " * 9, [])
    return model


def saved(place: Place, path: Path) -> str:
    asked(place.pool).cache.save(path, overwrite=True)
    return content_of(path, place.pool)


def full_disks(draw: random.Random, place: Place) -> Case:
    text, room = draw.choice((*WRITERS, "", "")), draw.choice(ROOM)
    expect = Expect.TAKEN if room == 2**30 else Expect.REFUSED
    says = () if expect is Expect.TAKEN else ("too large", "no space", "full", "room")
    if not text:
        path = place.work / "a.safetensors"
        if draw.random() < 0.5:  # an older one stays whole
            place.copy("caches/lm.safetensors", path.name)
        right = made(lambda: content_of(place.pool / "caches/lm.safetensors", place.pool))
        what, act = f"cache.save with {room} bytes", lambda: saved(place, path)
        return Case(what, act, expect, (path.name,), reference=right, says=says, room=room)
    writes, unfinished = WRITERS[text]
    words = place.words(text)
    picture = (place.pool / "images/a.png").read_bytes()
    rows = "".join(f"{name}.png,list {i} .,none\n" for i, name in enumerate("a012"))
    files: dict[str, str | bytes] = {
        "asked.jsonl": '{"prompt": "what is this ?"}\n',
        "mine/q.csv": f"image,question,answer\n{rows}",
        **{f"mine/{name}.png": picture + bytes([i]) for i, name in enumerate("a012")},
    }
    for other, content in files.items():
        place.write(other, content)
    if text.startswith("data images"):  # what is missing is an answer of its own
        expect, says = Expect.REFUSED, ()
    if len(writes) == 1 and draw.random() < 0.4:
        what, comes = f"{words[0]}, and a file comes to its place", place.work / writes[0]
        return Case(what, words, Expect.REFUSED, writes_anyway=unfinished, comes=comes)
    reference = same(place, words, TENSORS if words[0] == "fit" else writes, files)
    what = f"{words[0]} with {room} bytes"
    return Case(what, words, expect, writes, unfinished, reference=reference, says=says, room=room)
