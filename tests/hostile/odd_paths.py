"""Links that go round, pipes, devices and folders in the place of every path that a command takes."""

from __future__ import annotations

import os
import random
from importlib.util import find_spec
from pathlib import Path

from tests.hostile.case import Case, Expect, Place
from tests.hostile.pool import LM, VLM

ROUND = ("round", "there", "behind", "chain")
KINDS = (*ROUND, "pipe", "zero", "socket")
"""A link to itself, to one that leads back, a path behind one, forty links in a row; things that no reader ends in."""


def odd(kind: str, path: Path) -> str:
    """Put something odd at a path; the path to be named."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind in ("round", "behind"):
        path.symlink_to(path.name)
        return f"{path.name}/inner" if kind == "behind" else path.name
    if kind == "there":
        path.symlink_to("back")
        path.with_name("back").symlink_to(path.name)
    elif kind == "chain":
        for number in range(50):
            path.with_name(f"link{number}").symlink_to(f"link{number + 1}")
        path.symlink_to("link0")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "zero":
        path.symlink_to("/dev/zero")
    else:
        os.mknod(path, 0o140600)
    return path.name


def commands(place: Place) -> dict[str, tuple[list[str], str]]:
    """Every path of the command line: the words before it, and its option (empty: it stands alone)."""
    vlm, lm = str(place.pool / "adapters" / VLM), str(place.pool / "adapters" / LM)
    recipe, dev = str(place.pool / f"{VLM}.yaml"), str(place.pool / "scenes/dev.json")
    ask = ["generate", "--prompt", "what ?", "--max-new-tokens", "1"]
    scored = ["evaluate", "--adapter", vlm, "--data", dev, "--limit", "1", "--max-new-tokens", "1"]
    llama = str(place.pool / "backbones/tiny-llama")
    calibrate = ["calibrate", "prefixkv", "--option", "samples=2", "--option", "context_length=300"]
    return {
        "init": (["init"], ""),
        "init --table": (["init", "mine"], "--table"),
        "init --backbone": (["init", "mine"], "--backbone"),
        "init --out": (["init", "mine"], "--out"),
        "fit": (["fit"], "--config"),
        "fit --output_dir": (["fit", "--config", recipe], "--output_dir"),
        "fit data": (["fit", "--config", recipe], "--data.train_file"),
        "fit images": (["fit", "--config", recipe], "--data.image_folder"),
        "fit backbone": (["fit", "--config", recipe], "--model.backbone.path"),
        "check": (["check"], "--config"),
        "check data": (["check", "--config", recipe], "--data.train_file"),
        "check backbone": (["check", "--config", recipe], "--model.backbone.path"),
        "preview": (["preview", "--count", "1"], "--config"),
        "preview data": (["preview", "--config", recipe], "--data.train_file"),
        "sweep": (["sweep", "--set", "checkpoint.keep_last=1,2", "--dry-run"], "--config"),
        "evaluate --adapter": (["evaluate", "--data", dev, "--limit", "1"], "--adapter"),
        "evaluate --data": (["evaluate", "--adapter", vlm], "--data"),
        "evaluate --config": (["evaluate"], "--config"),
        "evaluate --image-folder": (scored, "--image-folder"),
        "evaluate --out": (scored, "--out"),
        "report": (["report"], ""),
        "report --out": (["report", str(place.pool / "results")], "--out"),
        "report --compare-paper": (["report", str(place.pool / "results"), "--out", "tables"], "--compare-paper"),
        "generate --image": ([*ask, "--adapter", vlm], "--image"),
        "generate --adapter": (ask, "--adapter"),
        "generate --backbone": (ask, "--backbone"),
        "generate --show": ([*ask, "--adapter", vlm, "--image", str(place.pool / "images/a.png")], "--show"),
        "generate --prompts": (["generate", "--adapter", lm, "--output", "out.jsonl"], "--prompts"),
        "generate calibration": ([*ask, "--backbone", llama, "--eviction", "prefixkv", "--eviction-keep", "0.5"],
        "--eviction-option=calibration"),
        "benchmark --adapter": (["benchmark"], "--adapter"),
        "calibrate --backbone": ([*calibrate, "--out", "made.json"], "--backbone"),
        "calibrate --out": ([*calibrate, "--backbone", llama], "--out"),
        "diagnose --adapter": (["diagnose", "--data", dev], "--adapter"),
        "diagnose --data": (["diagnose", "--adapter", vlm], "--data"),
        "diagnose --out": (["diagnose", "--adapter", vlm, "--data", dev, "--limit", "1"], "--out"),
        "export": (["export"], " out"),
        "export to": (["export", vlm], ""),
        "export --metrics": (["export", vlm, "out"], "--metrics"),
        "data images --file": (["data", "images", "--root", "."], "--file"),
        "data images --root": (["data", "images", "--file", dev], "--root"),
        "data images --missing-list": (["data", "images", "--file", dev, "--root", "mine"], "--missing-list"),
        "data scenes --out": (["data", "scenes", "--train", "1", "--dev", "1", "--test", "1"], "--out"),
        "data pope --root": (["data", "pope", "--limit", "1"], "--root"),
        "recipes copy": (["recipes", "copy", "tiny_lora_only"], ""),
        **({"demo --adapter": (["demo"], "--adapter")} if find_spec("gradio") else {}),
    }  # fmt: skip


def make(draw: random.Random, place: Place) -> Case:
    """A command whose path is none."""
    picture = (place.pool / "images/a.png").read_bytes()
    for number in range(3):
        place.write(f"mine/{number}.png", picture + bytes([number]))
    rows = "".join(f"{number}.png,list {number} .,none\n" for number in range(3))
    place.write("mine/q.csv", f"image,question,answer\n{rows}")
    table = commands(place)
    name = draw.choice(list(table))
    kind = draw.choice(KINDS if name != "generate --show" else ("pipe", "zero", "socket"))  # a link is replaced there
    words, option = table[name]
    ending = {"--prompts": ".jsonl", "--data": ".json", "--show": ".png", "--out": "", "--config": ".yaml"}.get(
        option, ""
    )
    path = odd(kind, place.work / f"odd{ending}")
    if option == " out":
        words = [*words, path, "out"]
    elif not option:
        words = [*words, path]
    else:
        words = [*words, f"{option}={path}"]
    return Case(f"{name}: {kind}", words, Expect.REFUSED, says=("odd",))
