"""Outputs that would replace what is not theirs: runs, exports, reports, lists, data sets, in every kind of folder."""

from __future__ import annotations

import random
from pathlib import Path

import yaml

from tests.hostile.case import Case, Expect, Place
from tests.hostile.pool import VLM
from tests.hostile.recipes import TENSORS, read, with_key
from tests.hostile.references import same

MINE = (
    *("thesis.txt", "logs/mine.txt", "recipe.yaml", "a.partial", "checkpoints/mine.bin", "adapter/mine.bin"),
    *("checkpoints/step-1.partial/x", "data/train.json"),
)


FILES = ("adapter_model.safetensors", "router.safetensors", "subtoken_config.json", "adapter_config.json")


def occupy(draw: random.Random, folder: Path) -> str:
    """Put somebody's files into a folder; what."""
    names = draw.sample(MINE, draw.choice((1, 1, 2, 3)))
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"mine: {name}\n")
    return ", ".join(names)


def fit(draw: random.Random, place: Place) -> Case:
    """``fit`` into a folder that is no run of this program."""
    target = draw.choice(("run", "run", "deep/run"))
    what = occupy(draw, place.work / target)
    recipe = with_key(read(place, VLM), "output_dir", target)
    flags = draw.choice(([], ["--overwrite"], ["--overwrite"], ["--resume"]))
    place.write("r.yaml", yaml.safe_dump(recipe))
    return Case(f"fit {flags} into a folder with {what}", ["fit", "--config", "r.yaml", *flags], Expect.REFUSED)


def key(draw: random.Random, place: Place) -> Case:
    """``overwrite: true`` inside a recipe."""
    place.copy("run", "run")
    place.write("r.yaml", yaml.safe_dump({**read(place, VLM), "overwrite": True}))
    return Case("fit with overwrite in the recipe", ["fit", "--config", "r.yaml"], Expect.REFUSED)


def current(draw: random.Random, place: Place) -> Case:
    """A run in the current folder, in one above it, or where the data are."""
    where = draw.choice((".", "..", "../beside", "scenes", "./", "run/..", "../work"))
    place.copy("scenes", "scenes")
    recipe = with_key(with_key(read(place, VLM), "output_dir", where), "data.train_file", "scenes/train.json")
    place.write("r.yaml", yaml.safe_dump(recipe))
    flags = draw.choice(([], ["--overwrite"]))
    return Case(f"fit {flags} into {where}", ["fit", "--config", "r.yaml", *flags], Expect.REFUSED)


def link(draw: random.Random, place: Place) -> Case:
    """A run through a link to somebody's folder."""
    (place.work / "run").symlink_to("../beside")
    place.write("r.yaml", yaml.safe_dump(read(place, VLM)))
    flags = draw.choice(([], ["--overwrite"]))
    return Case(f"fit {flags} through a link", ["fit", "--config", "r.yaml", *flags], Expect.REFUSED)


def again(draw: random.Random, place: Place) -> Case:
    """A finished run, and a second one that is refused, diverges, or is right."""
    place.copy("run", "run")
    extra, expect = draw.choice((
        ("--model.optimizer.weight_decay=-1", Expect.REFUSED),
        ("--data.num_workers=-1", Expect.REFUSED),
        ("--trainer.accumulate_grad_batches=0", Expect.REFUSED),
        ("--trainer.gradient_clip_val=nan", Expect.REFUSED),
        ("--model.optimizer.learning_rate=nan", Expect.REFUSED),
        ("--data.train_file=nowhere.json", Expect.REFUSED),
        ("--model.backbone.path=nowhere/at/all", Expect.REFUSED),
        ("--data.seed=3", Expect.TAKEN),
    ))  # fmt: skip
    flags = draw.choice((["--overwrite"], ["--overwrite"], []))
    words = ["fit", "--config", str(place.pool / f"{VLM}.yaml"), extra, *flags]
    if not flags:
        expect = Expect.REFUSED
    reference = same(place, words, TENSORS)
    return Case(f"fit {flags} again with {extra}", words, expect, ("run",), reference=reference)


def foreign(draw: random.Random, place: Place) -> Case:
    """A run that also holds somebody's file, replaced."""
    place.copy("run", "run")
    place.write("run/thesis.txt", "a year of work\n")
    words = ["fit", "--config", str(place.pool / f"{VLM}.yaml"), "--overwrite"]
    known = tuple(f"run/{name}" for name in ("adapter", "checkpoints", "logs", "recipe.yaml", ".subtoken-run.json"))
    reference = same(place, words, TENSORS)  # and the thesis is still somewhere
    return Case(
        "fit --overwrite over a run with a thesis in it", words, Expect.TAKEN, known, moves=(".",), reference=reference
    )


def exported(draw: random.Random, place: Place) -> Case:
    """``export`` beside and into what is somebody's."""
    kind = draw.choice(("siblings", "siblings", "folder", "file", "adapter", "link", "itself"))
    adapter = place.copy("run/adapter", "adapter")
    words, expect, writes = ["export", "adapter", "out"], Expect.REFUSED, ("out",)
    if kind == "siblings":
        for ending in (".partial", ".replaced", ".old", ".tmp"):
            place.write(f"out{ending}/thesis.txt", "a year of work\n")
        expect = Expect.TAKEN
    elif kind == "folder":
        occupy(draw, place.work / "out")
    elif kind == "file":
        place.write("out", "mine\n")
    elif kind == "adapter":
        place.copy("run/adapter", "out")
        if draw.random() < 0.5:
            place.write("out/thesis.txt", "a year of work\n")
            expect, writes = Expect.REFUSED, tuple(f"out/{path.name}" for path in adapter.iterdir())
        else:
            expect = Expect.TAKEN
        words += ["--overwrite"]
        reference = same(place, words, [f"out/{name}" for name in FILES])
        return Case(f"export over an adapter, {writes[0]}", words, expect, writes, moves=("out",), reference=reference)
    elif kind == "link":
        (place.work / "out").symlink_to("../beside")
    else:
        words[2] = draw.choice(("adapter", "adapter/", ".", "..", "adapter/x"))
        itself = words[2] in ("adapter", "adapter/")  # written anew, byte for byte
        expect, writes = Expect.REFUSED, ("adapter",) if itself else ()
    flags = ["--overwrite"] if draw.random() < 0.6 and kind not in ("siblings",) else []
    if kind == "siblings":
        flags = draw.choice(([], ["--overwrite"]))
    if kind == "itself" and writes and flags:
        expect = Expect.TAKEN
    reference = same(place, [*words, *flags], [f"{words[2].strip('/')}/{name}" for name in FILES])
    return Case(f"export {flags} {words[2]}, {kind}", [*words, *flags], expect, writes, reference=reference)


def listed(draw: random.Random, place: Place) -> Case:
    """A list of missing images over somebody's file."""
    place.copy("scenes")
    over = draw.choice(("diary.txt", "scenes/train.json", "scenes/train/000000.jpg", "../beside/notes.txt", "scenes"))
    words = ["data", "images", "--file", "scenes/train.json", "--root", "nowhere", "--missing-list", over]
    return Case(f"a list over {over}", words, Expect.REFUSED)


def reported(draw: random.Random, place: Place) -> Case:
    """A report into somebody's folder."""
    place.copy("results")
    name = draw.choice(("tables/report.csv", "tables/report.html", "tables"))
    place.write(name, "mine\n")
    return Case(f"a report over {name}", ["report", "results", "--out", "tables"], Expect.REFUSED)


def copied(draw: random.Random, place: Place) -> Case:
    """A recipe over a file, or to where no folder is."""
    target = draw.choice(("diary.txt", "nowhere/x.yaml", "diary.txt/x.yaml", "../beside/notes.txt"))
    words = ["recipes", "copy", "tiny_lora_only", target]
    return Case(f"a recipe to {target}", words, Expect.REFUSED)


def made(draw: random.Random, place: Place) -> Case:
    """A data set, diagnostics, scores or a picture over what is there."""
    place.copy("scenes")
    adapter, image = str(place.pool / "adapters" / VLM), "scenes/dev/000000.jpg"
    what = occupy(draw, place.work / "out")
    data = ["--adapter", adapter, "--data", "scenes/dev.json"]
    words = draw.choice((
        ["data", draw.choice(("english", "samples", "scenes")), "--out", "out", *draw.choice(([], ["--overwrite"]))],
        ["diagnose", *data, "--out", "out"],
        ["evaluate", *data, "--limit", "1", "--out", "diary.txt"],
        ["generate", "--adapter", adapter, "--image", image, "--prompt", "what ?", "--max-new-tokens", "1", "--show",
         draw.choice((image, "diary.txt", "."))],
    ))  # fmt: skip
    return Case(f"{words[0]} into a folder with {what}", words, Expect.REFUSED)


KINDS = (
    *(fit, fit, fit, key, current, current, link, again, again, foreign, exported, exported, exported),
    *(listed, reported, copied, made),
)


def make(draw: random.Random, place: Place) -> Case:
    """A command that writes where something is."""
    return draw.choice(KINDS)(draw, place)
