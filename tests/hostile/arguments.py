"""Words of a command line that do not belong there, for every command."""

from __future__ import annotations

import random

from tests.hostile.case import Case, Expect, Place
from tests.hostile.pool import LM, VLM
from tests.hostile.references import same
from tests.hostile.values import NAMES

NUMBERS = (
    *("0", "-1", "1.5", "NaN", "inf", "-inf", "1e400", "9" * 400, "x", "", " ", "0x10", "1_000", "٣", "1,5", "--"),
    *("None", "[]", "2**63"),
)
COMMANDS = (
    *("fit", "check", "preview", "evaluate", "report", "generate", "benchmark", "calibrate", "diagnose", "export"),
    *("data", "sweep", "recipes", "budget", "env"),
)
BAD_COUNT = ("0", "-1", "1.5", "NaN", "inf", "x", "", " ", "0x10", "None", "[]", "9e9")
BAD_SHARE = ("0", "-1", "1.5", "NaN", "inf", "-inf", "1e400", "x", "", "25%", "9" * 400)
BAD_KEEP = (
    *("", "0", "-1", "NaN", "inf", "1.5", "x", "5%", "0tokens", "-5tokens", "1.5tokens", "-1MB", "0MB", "NaNMB"),
    *("infMB", "MB", "tokens", "9" * 400 + "tokens"),
)
Odd = tuple[list[str], str, str]
"""The words of a command, an option and a value that it must refuse."""


def asking(place: Place) -> list[str]:
    """A prompt to the language model."""
    adapter = str(place.pool / "adapters" / LM)
    return ["generate", "--adapter", adapter, "--prompt", "what is this ?", "--max-new-tokens", "1"]


def generate(draw: random.Random, place: Place) -> Odd:
    """``generate`` with one odd option."""
    option, values = draw.choice((
        ("--max-new-tokens", BAD_COUNT),
        ("--temperature", ("-1", "NaN", "inf", "x", "")),
        ("--num-beams", BAD_COUNT),
        ("--context-length", ("-1", "1.5", "NaN", "x", "")),
        ("--device", ("abacus", "", "cuda:99", "cpu:x", "meta")),
        ("--kv-dtype", ("int2", "", "float128", "os")),
        ("--eviction", ("nope", "", "../x", "snapkv ")),
        ("--scope", ("nope", "visual")),
        ("--reducer", ("nope", "fastv", "")),
        ("--image", ("", ".", "nowhere.png", "/dev/null", "../beside/notes.txt", "\x00")),
        ("--adapter", ("", ".", "nowhere", "../beside", "/dev/null", "a/b/c", "x" * 300, "\x00", "user/name")),
        ("--backbone", ("", ".", "nowhere/at/all", "../beside", "/dev/null", "\x00")),
        ("--eviction-option", ("x", "a=b", "=", "seed=x", "window=-1", "window=NaN", "window=" + "9" * 400)),
    ))  # fmt: skip
    value = draw.choice(values)
    words = asking(place)
    if option == "--eviction-option":
        method = draw.choice(("snapkv", "kvcompose", "random", "streaming_llm"))
        words += ["--eviction", method, "--eviction-keep", "0.5"]
        if value == "seed=x" and "random" not in words:
            value = "x"
    return words, option, value


def keep(draw: random.Random, place: Place) -> Odd:
    """``generate`` with a budget that is none."""
    words = [*asking(place), "--eviction", draw.choice(("snapkv", "knorm"))]
    return words, "--eviction-keep", draw.choice(BAD_KEEP)


def budget(draw: random.Random, place: Place) -> Odd:
    """``budget`` with one odd number."""
    words = ["budget", "--keep-ratio", "0.25", "--num-groups", "16", "--kept-groups", "4"]
    if draw.random() < 0.5:
        words += ["--model", "llava-1.5-7b", "--tokens", "576"]
    option, values = draw.choice((
        ("--keep-ratio", BAD_SHARE),
        ("--num-groups", BAD_COUNT),
        ("--kept-groups", (*BAD_COUNT, "17")),
        ("--model", ("nope", "", "../x", "[red]x", "\x1b[31m")),
        ("--tokens", BAD_COUNT),
    ))  # fmt: skip
    if option == "--tokens" and "--model" not in words:
        words += ["--model", "llava-1.5-7b"]
    return words, option, draw.choice(values)


def evaluate(draw: random.Random, place: Place) -> Odd:
    """``evaluate`` with one odd option."""
    words = ["evaluate", "--adapter", str(place.pool / "adapters" / VLM)]
    data = ["--data", str(place.pool / "scenes/dev.json"), "--limit", "1", "--max-new-tokens", "1"]
    option, values = draw.choice((
        ("--batch-size", BAD_COUNT),
        ("--max-new-tokens", BAD_COUNT),
        ("--max-length", BAD_COUNT),
        ("--limit", BAD_COUNT),
        ("--image-folder", ("nowhere", "/dev/null", "\x00")),
        ("--protocol", ("nope",)),
        ("--anchors", ("perhaps",)),
        ("--device", ("abacus",)),
        ("--tasks", ("nope", "", ",", "scenes_pope,nope", "../x", "\x00")),
        ("--suite", ("nope", "", "../x")),
        ("--config", ("nowhere.yaml", "", ".", "/dev/null")),
        ("--data", ("nowhere.json", "", ".", "/dev/null", "\x00")),
        ("--out", ("diary.txt", "../beside", "../beside/notes.txt", ".")),
    ))  # fmt: skip
    if option not in ("--tasks", "--suite", "--config", "--data"):
        words += data
    return words, option, draw.choice(values)


def others(draw: random.Random, place: Place) -> Odd:
    """The other commands, with one odd option."""
    adapter = str(place.pool / "adapters" / VLM)
    recipe = str(place.pool / f"{VLM}.yaml")
    words, option, values = draw.choice((
        (["preview", "--config", recipe], "--count", BAD_COUNT),
        (["diagnose", "--adapter", adapter, "--data", "x"], "--limit", BAD_COUNT),
        (["diagnose"], "--adapter", (".", "nowhere", "", "\x00", f"{adapter}_anchor")),
        (["benchmark", "--adapter", adapter], "--lengths", BAD_COUNT),
        (["benchmark", "--adapter", adapter], "--batch-sizes", BAD_COUNT),
        (["benchmark", "--adapter", adapter], "--pairs", BAD_COUNT),
        (["benchmark", "--adapter", adapter], "--device", ("abacus", "", "cuda:99", "\x00")),
        (["benchmark"], "--model", ("nowhere", "", ".", "/dev/null", "\x00", adapter)),
        (["benchmark", "--adapter", adapter], "--out", (".", "diary.txt", "/dev/null/x", "")),
        (["data", "scenes", "--out", "made"], "--train", ("-1", "x", "1.5", "", "NaN")),
        (["data", "scenes", "--out", "made"], "--seed", ("-1", "x", "1.5", "", "NaN")),
        (["data", "images", "--root", "."], "--file", ("nowhere", "", ".", "diary.txt", "/dev/null")),
        (["data", "pope"], "--root", ("nowhere", ".", "/dev/null", "diary.txt", "\x00")),
        (["data", "ruler_synthetic"], "--option", ("x", "=", "a=b", "length=x", "length=-1",
            "length=!!python/name:os.system", "length=[", "length=&a [*a]")),
        (["data", "pope", "--root", "."], "--limit", BAD_COUNT),
        (["report", "."], "--format", ("", "pdf", "csv,,html", "../x")),
        (["sweep", "--config", recipe, "--dry-run"], "--set", ("", "x", "=1", "a=1", "data.seed=", "data.seed=1,1",
            "data.seed=[", "output_dir=a", "overwrite=true", "data.seed=x", "__class__=1")),
        (["export", adapter, "out"], "--backbone", ("nowhere/at/all", "", ".", "\x00")),
        (["export", adapter, "out"], "--push-to-hub", ("", "a/b/c", "../x", "a b", "\x00", "-")),
        (["export", adapter, "out"], "--metrics", ("nowhere", ".", "diary.txt", "/dev/null", "\x00")),
        (["export", adapter, "out"], "--revision", ("x",)),
        (["check", "--config", recipe], "--config", ("nowhere.yaml", "", ".", "/dev/null", "\x00")),
        (["fit"], "--config", ("nowhere.yaml", "", ".", "diary.txt", "tiny_lora_onyl")),
    ))  # fmt: skip
    return [*words], option, draw.choice(values)


def free(draw: random.Random, place: Place) -> Case:
    """A command with words from nowhere."""
    options = (
        *("--nope", "--adapter", "--config", "--out", "--set", "--limit", "-c", "-x", "--", "--offline"),
        *("--print_config", "--data", "show", "ls", "copy", "--help=1", "--config="),
    )
    while True:
        words = [draw.choice((*COMMANDS, draw.choice(NAMES), "fti", "recipe"))]
        words += [draw.choice((*options, *NAMES, *NUMBERS)) for _ in range(draw.randrange(1, 4))]
        answers = {"-h", "--help", "--version", "ls", "copy", "--print_config"}.intersection(words)
        if not answers and words[0] not in ("recipes", "", "data", "env"):
            return Case(f"free: {words}"[:200], words, Expect.REFUSED)


def whole(draw: random.Random, place: Place) -> Case:
    """Commands that must work."""
    adapter = str(place.pool / "adapters" / LM)
    words, writes = draw.choice((
        (["env"], ()),
        (["recipes", "ls", "tiny"], ()),
        (["recipes", "show", "tiny_lora_only"], ()),
        (["recipes", "copy", "tiny_lora_only", "mine.yaml"], ("mine.yaml",)),
        (["budget", "--keep-ratio", "1", "--num-groups", "4", "--kept-groups", "4"], ()),
        (["generate", "--adapter", adapter, "--prompt", "what is this ?", "--max-new-tokens", "2"], ()),
        (["generate", "--adapter", adapter, "--prompt", "what is this ?", "--max-new-tokens", "1", "--eviction",
            "knorm", "--eviction-keep", "0.5"], ()),
        (["data", "scenes", "--out", "made", "--train", "2", "--dev", "2", "--test", "2"], ("made",)),
        ([draw.choice(COMMANDS), "--help"], ()),
        (["--version"], ()),
    ))  # fmt: skip
    return Case(f"whole: {words[:2]}", words, Expect.TAKEN, writes, reference=same(place, words, writes))


def make(draw: random.Random, place: Place) -> Case:
    """A command line with one thing wrong in it."""
    kinds = (generate, generate, keep, budget, evaluate, evaluate, others, others, others, free, free, whole)
    kind = draw.choice(kinds)
    if kind in (free, whole):
        return kind(draw, place)
    words, option, value = kind(draw, place)
    if option in words:
        index = words.index(option)
        del words[index : index + 2]
    shown = "a NUL character" if "\0" in value else value[:40] or option
    named = (
        option.strip("-").rstrip("s"),
        option.strip("-").replace("-", "_"),
        value.partition("=")[0].rpartition(".")[2] or option,
        shown,
        value[:40].encode("unicode_escape").decode() or option,
    )
    told = value.strip() and option != "--push-to-hub"  # of nothing a message may say that it is nothing
    what = f"{words[0]} {option} {value[:60]!r}"
    return Case(what, [*words, f"{option}={value}"], Expect.REFUSED, says=named if told else ())
