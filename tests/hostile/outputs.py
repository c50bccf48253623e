"""Outputs that would replace what is not theirs, disks without room, files that come while a command works."""

import random
from functools import cache
from pathlib import Path
from typing import Any

from tests.hostile.case import TENSORS, Case, Expect, Place, content_of, made, same
from tests.hostile.pool import asked_model

MINE = (
    "thesis.txt logs/mine.txt recipe.yaml a.partial checkpoints/mine.bin adapter/mine.bin "
    "checkpoints/step-1.partial/x data/train.json report.csv report.html"
).split()
ONE, SHORT, FIT = "--adapter {vlm} --data {dev} --limit 1", "--max-new-tokens 1", "fit --config {recipe}"
SHOW = f"generate --adapter {{vlm}} --image {{png}} --prompt 'what ?' {SHORT} --show"
INTO = {  # by a folder that holds somebody's files: commands that would write there
    "run": (FIT, f"{FIT} --overwrite", f"{FIT} --resume"), "deep/run": (f"{FIT} --output_dir=deep/run",),
    "out": (
        "data english --out out", "data samples --out out --overwrite", "data scenes --out out",
        f"diagnose {ONE} --out out", "export {vlm} out", "export {vlm} out --overwrite",
    ),
}  # fmt: skip
OVER = {  # by a command: paths that are no place for what it writes
    f"{FIT} --output_dir=": (".", "..", "../beside", "./", "run/..", "../work", "diary.txt", "link"),
    "recipes copy tiny_lora_only ": ("diary.txt", "nowhere/x.yaml", "diary.txt/x.yaml", "../beside/notes.txt"),
    "data images --file {dev} --root nowhere --missing-list ": ("diary.txt", "../beside/notes.txt", "../beside", "."),
    f"evaluate {ONE} {SHORT} --out ": ("diary.txt",), f"{SHOW} ": ("diary.txt", "."),
    "export {vlm} ": ("diary.txt", "link", ".", ".."),
}  # fmt: skip


def occupied(draw: random.Random, place: Place) -> Case:
    folder = draw.choice(list(INTO))
    names = draw.sample(MINE, draw.choice((1, 1, 2, 3)))
    for name in names:
        place.write(f"{folder}/{name}", f"mine: {name}\n")
    text = draw.choice(INTO[folder])
    return Case(f"{text[:60]}: a folder with {names}", place.words(text), Expect.REFUSED)


def over(draw: random.Random, place: Place) -> Case:
    (place.work / "link").symlink_to("../beside")
    text = draw.choice(list(OVER))
    text += draw.choice(OVER[text])
    return Case(text[-90:], place.words(text), Expect.REFUSED)


AGAIN = (
    "model.optimizer.weight_decay=-1 data.num_workers=-1 trainer.accumulate_grad_batches=0 "
    "trainer.gradient_clip_val=nan model.optimizer.learning_rate=nan data.train_file=nowhere.json "
    "model.backbone.path=nowhere/at/all data.seed=3"
).split()


def again(draw: random.Random, place: Place) -> Case:
    """A finished run, with somebody's file in it at times, and a second one that is refused, diverges, or is right."""
    place.copy("run")
    if foreign := draw.random() < 0.3:  # which is still somewhere afterwards
        place.write("run/thesis.txt", "a year of work\n")
    extra, flag = draw.choice(AGAIN), draw.choice(("", " --overwrite"))
    extra, flag = ("data.seed=3", " --overwrite") if foreign else (extra, flag)
    words = place.words(f"{FIT} --{extra}{flag}")
    expect = Expect.TAKEN if flag and extra == "data.seed=3" else Expect.REFUSED
    known = [f"run/{name}" for name in ("adapter", "checkpoints", "logs", "recipe.yaml", ".subtoken-run.json")]
    writes, moves = (known, (".",)) if foreign else (("run", "run.1"), ())  # where the old one goes
    return Case(f"again, {extra}{flag}", words, expect, writes, moves=moves, reference=same(place, words, TENSORS))


def exported(draw: random.Random, place: Place) -> Case:
    """Beside folders of nearly its name, over an adapter, over one with somebody's file in it, over what is read."""
    kind, adapter = draw.choice(("siblings", "adapter", "foreign", "itself")), place.copy("run/adapter", "adapter")
    target, flag = "out", " --overwrite"
    if kind == "siblings":
        flag = draw.choice(("", " --overwrite"))
        for ending in (".partial", ".replaced", ".old", ".tmp"):
            place.write(f"out{ending}/thesis.txt", "a year of work\n")
    elif kind == "itself":  # written anew, byte for byte
        target = draw.choice(("adapter", "adapter/x"))
    else:
        place.copy("run/adapter", "out")
    if kind == "foreign":
        place.write("out/thesis.txt", "a year of work\n")
    words = place.words(f"export adapter {target}{flag}")
    reference = same(place, words, [f"{target}/{path.name}" for path in adapter.iterdir()])
    expect = Expect.REFUSED if target == "adapter/x" else Expect.TAKEN
    moves = (target, f"{target}.1") if kind != "siblings" else ()  # where the old one goes
    return Case(f"export {target}{flag}, {kind}", words, expect, moves=moves or ("out",), reference=reference)


def folders(draw: random.Random, place: Place) -> Case:
    return draw.choice((occupied, occupied, over, over, again, exported))(draw, place)


ROOM = (0, 40, 2**30)  # bytes that a file may have: none, fewer than any of them takes, and as many as it likes
WRITERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # what it writes, and what it may leave unfinished
    "export {vlm} out": (("out",), ()), f"evaluate {ONE} {SHORT} --out out.json": (("out.json",), ()),
    "evaluate --config {pool}/grid.yaml --out results": (("results",), ("results",)),
    "report {pool}/results --out tables": (("tables",), ()),
    "calibrate prefixkv --backbone {llama} --out made.json --option samples=2 --option context_length=300": (
        ("made.json",), ()),
    f"diagnose {ONE} --out seen": (("seen",), ()),
    "data scenes --out made --train 1 --dev 1 --test 1": (("made",), ()), "init mine": (("mine_subtoken",), ()),
    f"{SHOW} kept.png": (("kept.png",), ()),
    f"generate --adapter {{lm}} --prompts {{pool}}/lm.jsonl --output out.jsonl {SHORT}": (
        ("out.jsonl", "out.jsonl.records"), ("out.jsonl.records",)),
    "recipes copy tiny_lora_only mine.yaml": (("mine.yaml",), ()), FIT: (("run",), ("run",)),
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
    place.copy("own_csv", "mine")
    (writes, unfinished), words = WRITERS[text], place.words(text)
    if len(writes) == 1 and draw.random() < 0.4:
        what, comes = f"{words[0]}, and a file comes to its place", place.work / writes[0]
        return Case(what, words, Expect.REFUSED, writes_anyway=unfinished, comes=comes)
    reference = same(place, words, TENSORS if words[0] == "fit" else writes)
    what = f"{words[0]} with {room} bytes"
    return Case(what, words, expect, writes, unfinished, reference=reference, says=says, room=room)
