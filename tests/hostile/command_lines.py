"""Command lines: words that do not belong there, and paths that are none."""

import random
from functools import cache
from importlib.util import find_spec

from subtoken_train.cli.command_line import Parser
from subtoken_train.cli.main import command_module
from tests.hostile.case import Case, Expect, Place, same
from tests.hostile.grammar import NAMES, ROUND, put

NO_COUNT = (*"1.5 NaN inf x 0x10 None [] 9e9 1_0.0 --".split(), "", " ")
NO_NUMBER = ("x", "1,5", "25%", "", " ", "None")
RANGE = ("0", "-1", "NaN", "inf", "9" * 400)
SHARE, KEEP = (*RANGE, "1.5", "1e400"), (*RANGE, *"x 5% 0tokens 1.5tokens -1MB NaNMB MB tokens".split())
COMMANDS = "fit check preview evaluate report generate benchmark calibrate diagnose export data sweep recipes".split()
COMMANDS += ["budget", "env"]
ASK = "generate --adapter {lm} --prompt 'what is this ?' --max-new-tokens 1"
SCORE = "evaluate --adapter {vlm} --data {dev} --limit 1 --max-new-tokens 1"
TABLE = "budget --keep-ratio 0.25 --num-groups 16 --kept-groups 4"
NOWHERE = ("", ".", "nowhere", "/dev/null", "../beside", "\x00")
ODD: dict[str, dict[str, tuple[str, ...]]] = {  # by a command that is right without it: options, and what they refuse
    ASK: {
        "--max-new-tokens": ("0", "-1"), "--temperature": ("-1", "NaN", "inf"), "--context-length": ("-1",),
        "--device": ("abacus", "", "cuda:99", "cpu:x", "meta"), "--kv-dtype": ("int2", "", "float128", "os"),
        "--eviction": ("nope", "", "../x", "snapkv "), "--scope": ("nope", "visual"),
        "--reducer": ("nope", "fastv", ""),
        "--image": (*NOWHERE, "../beside/notes.txt"), "--adapter": (*NOWHERE, "a/b/c", "x" * 300, "user/name"),
        "--backbone": NOWHERE,
    },
    **{f"{ASK} --eviction {name}": {"--eviction-keep": KEEP} for name in ("snapkv", "knorm")},
    **{f"{ASK} --eviction-keep 0.5 --eviction {name}": {"--eviction-option": ("x", "a=b", "=", "window=NaN", "seed=x")}
       for name in ("snapkv", "kvcompose", "streaming_llm", "random")},
    TABLE: {"--keep-ratio": SHARE, "--num-groups": ("0", "-1"), "--kept-groups": ("0", "-1", "17")},
    f"{TABLE} --model llava-1.5-7b --tokens 576": {"--model": ("nope", "", "../x", "[red]x", "\x1b[31m")},
    SCORE: {
        "--batch-size": ("0", "-1"), "--limit": ("0", "-1"), "--image-folder": ("nowhere", "/dev/null", "\x00"),
        "--protocol": ("nope",), "--anchors": ("perhaps",), "--device": ("abacus",),
        "--out": ("diary.txt", "../beside", "../beside/notes.txt", "."),
    },
    "evaluate --adapter {vlm}": {
        "--tasks": ("nope", "", ",", "scenes_pope,nope", "../x", "\x00"), "--suite": ("nope", "", "../x"),
        "--config": ("nowhere.yaml", "", ".", "/dev/null"), "--data": NOWHERE,
    },
    "preview --config {recipe}": {"--count": ("0", "-1")}, "diagnose": {"--adapter": (*NOWHERE[:3], "{vlm}_anchor")},
    "benchmark --adapter {vlm}": {
        "--lengths": ("0", "-1", "x"), "--batch-sizes": ("0", "x"), "--pairs": ("0", "-1"),
        "--device": ("abacus", "", "cuda:99", "\x00"), "--out": (".", "diary.txt", "/dev/null/x", ""),
    },
    "benchmark": {"--model": (*NOWHERE, "{vlm}")}, "data scenes --out made": {"--train": ("-1",), "--seed": ("-1",)},
    "data images --root .": {"--file": ("nowhere", "", ".", "diary.txt", "/dev/null")},
    "data pope": {"--root": ("nowhere", ".", "/dev/null", "diary.txt", "\x00")},
    "data ruler_synthetic": {"--option": (
        "x", "=", "a=b", "length=x", "length=-1", "length=!!python/name:os.system", "length=[", "length=&a [*a]",
    )},
    "report .": {"--format": ("", "pdf", "csv,,html", "../x")},
    "sweep --config {recipe} --dry-run": {"--set": (
        "", "x", "=1", "a=1", "data.seed=", "data.seed=1,1", "data.seed=[", "output_dir=a", "overwrite=true",
        "data.seed=x", "__class__=1",
    )},
    "export {vlm} out": {
        "--backbone": ("nowhere/at/all", "", ".", "\x00"), "--metrics": ("nowhere", ".", "diary.txt", "/dev/null"),
        "--push-to-hub": ("", "a/b/c", "../x", "a b", "\x00", "-"), "--revision": ("x",),
    },
    "check": {"--config": ("nowhere.yaml", "", ".", "/dev/null", "\x00")},
    "fit": {"--config": ("nowhere.yaml", "", ".", "diary.txt", "tiny_lora_onyl")},
}  # fmt: skip
FREE = (
    "--nope --adapter --config --out --set --limit -c -x -- --offline --print_config --data show ls copy --help=1 "
    "--config= -1 1.5"
).split()
WORKS = {
    "env": (), "recipes ls tiny": (), "recipes show tiny_lora_only": (), "--version": (), f"{TABLE}": (), ASK: (),
    "recipes copy tiny_lora_only mine.yaml": ("mine.yaml",), f"{ASK} --eviction knorm --eviction-keep 0.5": (),
    "data scenes --out made --train 2 --dev 2 --test 2": ("made",),
}  # fmt: skip


@cache
def typed() -> list[tuple[str, str, tuple[str, ...]]]:
    """Every option of every command that its parser reads as a number: what is none is refused at once."""
    found = []
    for name in (name for name in COMMANDS if hasattr(command_module(name), "add_arguments")):
        parser = Parser()
        command_module(name).add_arguments(parser)
        kinds = ((action.option_strings, action.type) for action in parser._actions if action.option_strings)
        found += [(name, options[-1], NO_COUNT if kind is int else NO_NUMBER) for options, kind in kinds
                  if kind in (int, float)]  # fmt: skip
    return found


def refused_option(text: str, place: Place, option: str, value: str) -> Case:
    """A value that an option refuses, which names the option or the value."""
    words = place.words(text)
    if option in words:
        index = words.index(option)
        del words[index : index + 2]
    shown = value[:40].encode("unicode_escape").decode()
    names = (option.strip("-").rstrip("s"), option.strip("-").replace("-", "_"))
    named = (*names, "a NUL" if "\0" in value else "", shown, value.partition("=")[0].rpartition(".")[2], value[:40])
    told = value.strip() and option != "--push-to-hub"  # of nothing a message may say that it is nothing
    what = f"{words[0]} {option} {value[:60]!r}"
    return Case(what, [*words, f"{option}={value}"], Expect.REFUSED, says=tuple(filter(None, named)) if told else ())


def arguments(draw: random.Random, place: Place) -> Case:
    kind = draw.choice((*["odd"] * 5, *["typed"] * 3, "free", "free", "works"))
    if kind == "typed":
        name, option, values = draw.choice(typed())
        return refused_option(name, place, option, draw.choice(values))
    if kind == "works":
        text = draw.choice((*WORKS, f"{draw.choice(COMMANDS)} --help"))
        words, writes = place.words(text), WORKS.get(text, ())
        return Case(f"whole: {words[:2]}", words, Expect.TAKEN, writes, reference=same(place, words, writes))
    while kind == "free":
        words = [draw.choice((*COMMANDS, draw.choice(NAMES), "fti", "recipe")), *draw.choices((*FREE, *NAMES), k=2)]
        answers = {"-h", "--help", "--version", "ls", "copy", "--print_config"}.intersection(words)
        if not answers and words[0] not in ("recipes", "", "data", "env"):
            return Case(f"free: {words}"[:200], words, Expect.REFUSED)
    text = draw.choice(list(ODD))
    option = draw.choice(list(ODD[text]))
    return refused_option(text, place, option, draw.choice(ODD[text][option]).replace("{vlm}", place.words("{vlm}")[0]))


RUN = "--config {recipe}"
SHORT = "generate --prompt 'what ?' --max-new-tokens 1"
CALIBRATE = "calibrate prefixkv --option samples=2 --option context_length=300"
EVERY_PATH = (  # every path of the command line: it is put behind ``=``, between two spaces, or at the end
    "init", "init mine --table=", "init mine --backbone=", "init mine --out=", "fit --config=",
    f"fit {RUN} --output_dir=", f"fit {RUN} --data.train_file=", f"fit {RUN} --data.image_folder=",
    f"fit {RUN} --model.backbone.path=", "check --config=", f"check {RUN} --data.train_file=",
    f"check {RUN} --model.backbone.path=", "preview --count 1 --config=", f"preview {RUN} --data.train_file=",
    "sweep --set checkpoint.keep_last=1,2 --dry-run --config=", "evaluate --data {dev} --limit 1 --adapter=",
    "evaluate --adapter {vlm} --data=", "evaluate --config=", f"{SCORE} --image-folder=", f"{SCORE} --out=",
    "report", "report {pool}/results --out=",
    f"{SHORT} --adapter {{vlm}} --image=", f"{SHORT} --adapter=", f"{SHORT} --backbone=",
    f"{SHORT} --adapter {{vlm}} --image {{png}} --show=", "generate --adapter {lm} --output out.jsonl --prompts=",
    f"{SHORT} --backbone {{llama}} --eviction prefixkv --eviction-keep 0.5 --eviction-option=calibration=",
    "benchmark --adapter=", f"{CALIBRATE} --out made.json --backbone=", f"{CALIBRATE} --backbone {{llama}} --out=",
    "diagnose --data {dev} --adapter=", "diagnose --adapter {vlm} --data=",
    "diagnose --adapter {vlm} --data {dev} --limit 1 --out=", "export  out", "export {vlm}",
    "export {vlm} out --metrics=", "data images --root . --file=", "data images --file {dev} --root=",
    "data images --file {dev} --root mine --missing-list=", "data scenes --train 1 --dev 1 --test 1 --out=",
    "data pope --limit 1 --root=", "recipes copy tiny_lora_only",
    *(["demo --adapter="] if find_spec("gradio") else []),
)  # fmt: skip
ENDINGS = {"--prompts=": ".jsonl", "--data=": ".json", "--show=": ".png", "--out=": "", "--config=": ".yaml"}


def odd_paths(draw: random.Random, place: Place) -> Case:
    place.copy("own_csv", "mine")
    text = draw.choice(EVERY_PATH)
    *_, last = text.split()
    kind = draw.choice((*(ROUND if last != "--show=" else ()), "pipe", "zero", "socket"))  # a link is replaced there
    path = put(kind, place.work / f"odd{ENDINGS.get(last, '')}")
    words = place.words(text)
    if last.endswith("="):
        words[-1] += path
    else:
        words.insert(1 if "  " in text else len(words), path)
    return Case(f"{text[:60]}: {kind}", words, Expect.REFUSED, says=("odd",))
