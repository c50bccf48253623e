"""Command lines: words that do not belong there, paths that are none, and names that a shell would take for its own."""

import os
import random
import subprocess
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import yaml

from tests.hostile.case import CANARY, VLM, Answer, Case, Expect, Place, Reference, command, same
from tests.hostile.values import NAMES, ROUND, put

NUMBERS = (*"0 -1 1.5 NaN inf -inf 1e400 x 0x10 1_000 ٣ 1,5 -- None [] 2**63".split(), "9" * 400, "", " ")
COMMANDS = "fit check preview evaluate report generate benchmark calibrate diagnose export data sweep recipes".split()
COMMANDS += ["budget", "env"]
COUNT = (*"0 -1 1.5 NaN inf x 0x10 None [] 9e9".split(), "", " ")
SHARE = (*"0 -1 1.5 NaN inf -inf 1e400 x 25%".split(), "", "9" * 400)
KEEP = (
    *"0 -1 NaN inf 1.5 x 5% 0tokens -5tokens 1.5tokens -1MB 0MB NaNMB infMB MB tokens".split(), "",
    "9" * 400 + "tokens",
)  # fmt: skip
ASK = "generate --adapter {lm} --prompt 'what is this ?' --max-new-tokens 1"
GENERATE = {
    "--max-new-tokens --num-beams": COUNT, "--temperature": ("-1", "NaN", "inf", "x", ""),
    "--context-length": ("-1", "1.5", "NaN", "x", ""), "--device": ("abacus", "", "cuda:99", "cpu:x", "meta"),
    "--kv-dtype": ("int2", "", "float128", "os"), "--eviction": ("nope", "", "../x", "snapkv "),
    "--scope": ("nope", "visual"), "--reducer": ("nope", "fastv", ""),
    "--image": ("", ".", "nowhere.png", "/dev/null", "../beside/notes.txt", "\x00"),
    "--adapter": ("", ".", "nowhere", "../beside", "/dev/null", "a/b/c", "x" * 300, "\x00", "user/name"),
    "--backbone": ("", ".", "nowhere/at/all", "../beside", "/dev/null", "\x00"),
}  # fmt: skip
OPTION = {"--eviction-option": ("x", "a=b", "=", "window=-1", "window=NaN", "window=" + "9" * 400)}
EVICTIONS = {
    "--eviction snapkv": {"--eviction-keep": KEEP}, "--eviction knorm": {"--eviction-keep": KEEP},
    "--eviction snapkv --eviction-keep 0.5": OPTION, "--eviction kvcompose --eviction-keep 0.5": OPTION,
    "--eviction streaming_llm --eviction-keep 0.5": OPTION,
    "--eviction random --eviction-keep 0.5": {"--eviction-option": ("x", "a=b", "=", "seed=x")},
}  # fmt: skip
BUDGET = {"--keep-ratio": SHARE, "--num-groups": COUNT, "--kept-groups": (*COUNT, "17")}
EVALUATE = {
    "--batch-size --max-new-tokens --max-length --limit": COUNT, "--image-folder": ("nowhere", "/dev/null", "\x00"),
    "--protocol": ("nope",), "--anchors": ("perhaps",), "--device": ("abacus",),
    "--out": ("diary.txt", "../beside", "../beside/notes.txt", "."),
}  # fmt: skip
NO_DATA = {
    "--tasks": ("nope", "", ",", "scenes_pope,nope", "../x", "\x00"), "--suite": ("nope", "", "../x"),
    "--config": ("nowhere.yaml", "", ".", "/dev/null"), "--data": ("nowhere.json", "", ".", "/dev/null", "\x00"),
}  # fmt: skip
SEED = ("-1", "x", "1.5", "", "NaN")
OTHERS = {
    "preview --config {recipe}": {"--count": COUNT}, "diagnose --adapter {vlm} --data x": {"--limit": COUNT},
    "diagnose": {"--adapter": (".", "nowhere", "", "\x00", "{vlm}_anchor")},
    "benchmark --adapter {vlm}": {
        "--lengths --batch-sizes --pairs": COUNT, "--device": ("abacus", "", "cuda:99", "\x00"),
        "--out": (".", "diary.txt", "/dev/null/x", ""),
    },
    "benchmark": {"--model": ("nowhere", "", ".", "/dev/null", "\x00", "{vlm}")},
    "data scenes --out made": {"--train --seed": SEED},
    "data images --root .": {"--file": ("nowhere", "", ".", "diary.txt", "/dev/null")},
    "data pope": {"--root": ("nowhere", ".", "/dev/null", "diary.txt", "\x00")},
    "data ruler_synthetic": {"--option": (
        "x", "=", "a=b", "length=x", "length=-1", "length=!!python/name:os.system", "length=[", "length=&a [*a]",
    )},
    "data pope --root .": {"--limit": COUNT}, "report .": {"--format": ("", "pdf", "csv,,html", "../x")},
    "sweep --config {recipe} --dry-run": {"--set": (
        "", "x", "=1", "a=1", "data.seed=", "data.seed=1,1", "data.seed=[", "output_dir=a", "overwrite=true",
        "data.seed=x", "__class__=1",
    )},
    "export {vlm} out": {
        "--backbone": ("nowhere/at/all", "", ".", "\x00"),
        "--push-to-hub": ("", "a/b/c", "../x", "a b", "\x00", "-"),
        "--metrics": ("nowhere", ".", "diary.txt", "/dev/null", "\x00"), "--revision": ("x",),
    },
    "check --config {recipe}": {"--config": ("nowhere.yaml", "", ".", "/dev/null", "\x00")},
    "fit": {"--config": ("nowhere.yaml", "", ".", "diary.txt", "tiny_lora_onyl")},
}  # fmt: skip
ODD = (  # groups of commands, each with options and values that it must refuse
    *[{ASK: GENERATE}] * 2, {f"{ASK} {more}": odd for more, odd in EVICTIONS.items()},
    {
        "budget --keep-ratio 0.25 --num-groups 16 --kept-groups 4": BUDGET,
        "budget --keep-ratio 0.25 --num-groups 16 --kept-groups 4 --model llava-1.5-7b --tokens 576":
            {**BUDGET, "--tokens": COUNT, "--model": ("nope", "", "../x", "[red]x", "\x1b[31m")},
    },
    *[{"evaluate --adapter {vlm} --data {dev} --limit 1 --max-new-tokens 1": EVALUATE,
       "evaluate --adapter {vlm}": NO_DATA}] * 2,
    *[OTHERS] * 3,
)  # fmt: skip
FREE = (
    "--nope --adapter --config --out --set --limit -c -x -- --offline --print_config --data show ls copy --help=1 "
    "--config="
).split()
WORKS = {
    "env": (), "recipes ls tiny": (), "recipes show tiny_lora_only": (), "--version": (),
    "recipes copy tiny_lora_only mine.yaml": ("mine.yaml",),
    "budget --keep-ratio 1 --num-groups 4 --kept-groups 4": (), ASK: (),
    f"{ASK} --eviction knorm --eviction-keep 0.5": (),
    "data scenes --out made --train 2 --dev 2 --test 2": ("made",), **{f"{name} --help": () for name in COMMANDS},
}  # fmt: skip


def free(draw: random.Random) -> Case:
    while True:
        words = [draw.choice((*COMMANDS, draw.choice(NAMES), "fti", "recipe"))]
        words += [draw.choice((*FREE, *NAMES, *NUMBERS)) for _ in range(draw.randrange(1, 4))]
        answers = {"-h", "--help", "--version", "ls", "copy", "--print_config"}.intersection(words)
        if not answers and words[0] not in ("recipes", "", "data", "env"):
            return Case(f"free: {words}"[:200], words, Expect.REFUSED)


def arguments(draw: random.Random, place: Place) -> Case:
    kind = draw.choice((*ODD, *[free] * 2, None))
    if kind is free:
        return free(draw)
    if kind is None:
        text = draw.choice((*[text for text in WORKS if "--help" not in text], f"{draw.choice(COMMANDS)} --help"))
        words = place.words(text)
        reference = same(place, words, WORKS[text])
        return Case(f"whole: {words[:2]}", words, Expect.TAKEN, WORKS[text], reference=reference)
    text = draw.choice([text for text, odd in kind.items() for _ in " ".join(odd).split()])
    words, options = place.words(text), kind[text]
    option, values = draw.choice([(option, options[several]) for several in options for option in several.split()])
    value = draw.choice(values)
    value = place.words(value)[0] if "{vlm}" in value else value
    if option in words:
        index = words.index(option)
        del words[index : index + 2]
    named = (
        option.strip("-").rstrip("s"),
        option.strip("-").replace("-", "_"),
        value.partition("=")[0].rpartition(".")[2] or option,
        "a NUL character" if "\0" in value else value[:40] or option,
        value[:40].encode("unicode_escape").decode() or option,
    )
    told = value.strip() and option != "--push-to-hub"  # of nothing a message may say that it is nothing
    what = f"{words[0]} {option} {value[:60]!r}"
    return Case(what, [*words, f"{option}={value}"], Expect.REFUSED, says=named if told else ())


RUN = "--config {recipe}"
SHORT = "generate --prompt 'what ?' --max-new-tokens 1"
SCORED = "evaluate --adapter {vlm} --data {dev} --limit 1 --max-new-tokens 1"
CALIBRATE = "calibrate prefixkv --option samples=2 --option context_length=300"
EVERY_PATH = (  # every path of the command line: it is put behind ``=``, between two spaces, or at the end
    "init", "init mine --table=", "init mine --backbone=", "init mine --out=", "fit --config=",
    f"fit {RUN} --output_dir=", f"fit {RUN} --data.train_file=", f"fit {RUN} --data.image_folder=",
    f"fit {RUN} --model.backbone.path=", "check --config=", f"check {RUN} --data.train_file=",
    f"check {RUN} --model.backbone.path=", "preview --count 1 --config=", f"preview {RUN} --data.train_file=",
    "sweep --set checkpoint.keep_last=1,2 --dry-run --config=", "evaluate --data {dev} --limit 1 --adapter=",
    "evaluate --adapter {vlm} --data=", "evaluate --config=", f"{SCORED} --image-folder=", f"{SCORED} --out=",
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
    picture = (place.pool / "images/a.png").read_bytes()
    for number in range(3):
        place.write(f"mine/{number}.png", picture + bytes([number]))
    rows = "".join(f"{number}.png,list {number} .,none\n" for number in range(3))
    place.write("mine/q.csv", f"image,question,answer\n{rows}")
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


TOUCH = f"touch {CANARY}"
PIECES = (  # what a shell or a terminal would take for its own
    f"\n{TOUCH}\n", f"\r\n{TOUCH} #", f"`{TOUCH}`", f"$({TOUCH})", f"; {TOUCH};", f"' {TOUCH} '", f'" {TOUCH} "',
    "\n", "\t", " ", "'", '"', "\\", "#", "*", "~", "!", "$HOME", "&", "\x1b[31m", "\u202e", "\u200b", "\x85", "é",
)  # fmt: skip


def shell_name(draw: random.Random) -> str:
    return "".join(f"x{piece}" for piece in draw.choices(PIECES, k=draw.choice((1, 2, 4))))


def scripts(draw: random.Random, place: Place) -> Case:
    kind, mine, folder = (
        draw.choice(("--dry-run", "--slurm", "grid", "anchor")), shell_name(draw), f"runs/{shell_name(draw)}",
    )  # fmt: skip
    text = (place.pool / f"{VLM}.yaml").read_text()
    place.write(f"{mine}.yaml", text)
    if kind == "anchor":
        place.write("plain.yaml", text)
        target = f"{shell_name(draw)}.yml"
        words, reference = ["recipes", "anchor", f"{mine}.yaml", target], same_settings(place.work, target)
        return Case(f"{kind}: {mine!r}", words, Expect.TAKEN, (target,), reference=reference)
    fit = ["fit", "--config", f"{mine}.yaml"]
    if kind == "grid":
        arms = [{"adapter": f"runs/{mine}/adapter"}]
        grid = {"out": "results", "anchors": "none", "tasks": ["scenes_pope"], "arms": arms}
        place.write("grid.yaml", yaml.safe_dump(grid))
        words = ["sweep", "--grid", "grid.yaml", "--slurm"]
        right = run_by_bash(place, [[*fit, f"--output_dir=runs/{mine}"]])
        return Case(f"{kind}: {mine!r}", words, Expect.TAKEN, reference=right)
    tasks = [[*fit, f"--data.seed={seed}", f"--output_dir={folder}/seed={seed}"] for seed in (1, 2)]
    words = ["sweep", *fit[1:], "--set", "data.seed=1,2", "--output_dir", folder, kind]
    # what Slurm reads itself knows no way to write such a character
    unnamed = kind == "--slurm" and not folder.isprintable()
    expect, says = (Expect.REFUSED, ("#SBATCH",)) if unnamed else (Expect.TAKEN, ())
    return Case(f"{kind}: {mine!r} {folder!r}", words, expect, reference=run_by_bash(place, tasks), says=says)


def run_by_bash(place: Place, right: Sequence[Sequence[str]]) -> Reference:
    """Each task of the script, or each of its lines, starts ``subtoken-train`` with these words; there are no more."""

    def difference(answer: Answer) -> str | None:
        programs = place.root / "bin"
        programs.mkdir()
        for program, said in (("subtoken-train", '"$@"'), ("srun", '"${@:2}"')):
            (programs / program).write_text(f"#!/bin/bash\nprintf '%s\\0' {said}\nprintf '\\n\\0'\n")
            (programs / program).chmod(0o755)
        said, script = b"", answer.out
        if "SLURM" not in script:  # a dry run: what it needs stands around the commands
            script = "\n".join(line for line in script.split("\n") if line.startswith("subtoken-train "))
        for task in range(len(right)) if "SLURM" in answer.out else range(1):
            around = {"PATH": f"{programs}:{os.environ['PATH']}", "SLURM_ARRAY_TASK_ID": str(task)}
            done = subprocess.run(["bash", "-c", script], env=around, cwd=place.root, capture_output=True, check=False)
            said += done.stdout + done.stderr
        if (place.root / CANARY).exists():
            return f"the script ran a name: {answer.out[-600:]}"
        wanted = b"".join(os.fsencode("\0".join((*words, "\n", ""))) for words in right)
        return None if said == wanted else f"{said[-400:]!r} is not {wanted[-400:]!r}"

    return difference


def same_settings(work: Path, made: str) -> Reference:
    def difference(answer: Answer) -> str | None:
        assert command(["recipes", "anchor", str(work / "plain.yaml"), str(work / "plain.yml")]).code == 0
        got, right = (yaml.safe_load((work / path).read_text()) for path in (made, "plain.yml"))
        return None if got == right else f"{got} is not {right}"

    return difference
