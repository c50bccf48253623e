"""The command line as a whole: exit codes, one-line errors, nearest names, completion, light paths without torch."""

import json
import os
import platform
import re
import subprocess
import sys
import warnings
from importlib.metadata import version

import pytest

import subtoken_train
from subtoken_train.cli import check
from subtoken_train.cli.command_line import Parser, check_options
from subtoken_train.cli.main import COMMANDS
from subtoken_train.cli.terminal import guarded
from subtoken_train.errors import SubTokenWarning
from tests.support.commands import printed, refused
from tests.support.places import ROOT, recipe


def test_help_and_version(capsys):
    for argv in ([], ["--help"], ["-h"]):
        out = printed(capsys, *argv)
        assert [name for name, summary in COMMANDS.items() if not re.search(f"  {name} +{summary}", out)] == []
    for argv in (["check", "--help"], ["check", "-h"], ["env", "--help"]):
        assert "--offline" in printed(capsys, *argv)
    assert "--count" in printed(capsys, "preview", "--help")
    assert printed(capsys, "--version") == f"subtoken-train {version('subtoken_train')}\n"
    assert subtoken_train.__version__ == version("subtoken_train")


def test_options_after_the_separator_and_values_with_blanks_are_left_alone():
    parser = Parser(prog="x")
    parser.add_argument("words", nargs="*")
    check_options(parser, ["--", "--not-an-option"])
    check_options(parser, ["--help", "--what is this"])


def test_our_warnings_are_one_line_and_others_stay_as_they_are(capsys):
    def action():
        warnings.warn("layer 0 keeps\n nothing", SubTokenWarning, stacklevel=1)
        warnings.warn("of a library", UserWarning, stacklevel=1)
        return 0

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        others = []
        warnings.showwarning = lambda *shown: others.append(str(shown[0]))
        assert guarded(action) == 0
    assert capsys.readouterr().err == "subtoken-train: warning: layer 0 keeps nothing\n"
    assert others == ["of a library"]


def test_versions_and_hardware(capsys, monkeypatch):
    facts = json.loads(printed(capsys, "env", "--json"))
    assert facts == json.loads(printed(capsys, "check", "--machine", "--json"))
    here = {"python": platform.python_version(), "torch": version("torch"), "cpu_count": os.cpu_count()}
    assert here.items() <= facts.items()
    assert {"subtoken_train", "platform", "nvidia_smi", *check.PACKAGES} <= set(facts)
    monkeypatch.setattr(check, "PACKAGES", ("no-such-package-at-all",))
    monkeypatch.setattr(check.shutil, "which", lambda name: None)
    rows = dict(line.split(maxsplit=1) for line in printed(capsys, "env").splitlines())
    assert (rows["no-such-package-at-all"], rows["nvidia_smi"]) == ("not installed", "none found")


RECIPE = recipe("tiny_fastv25_s16k4")
PROGRAM = """
import json, sys
import subtoken_train.plugins.lm_eval
from subtoken_train.cli.main import main
HEAVY = {"torch", "transformers", "lightning", "pandas", "matplotlib", "lm_eval", "lmms_eval"}
for words in json.load(sys.stdin):
    code = main(words)
    heavy = [*HEAVY.intersection(sys.modules)]
    print("@", code, heavy, " ".join(words), file=sys.__stdout__)
    if heavy:
        break
"""
NEEDS_NO_TENSORS = f"""
0 --help
0 recipes ls
0 env
2 fit
2 fit --config nope.yaml
2 fit --config {RECIPE} --output_dir key.yaml/x
2 fit --config broken.yaml
2 fit --config {RECIPE} --model.routing.kept_group=3
2 fit --config {RECIPE} --trainer.callbacks=os.system
2 check --offline --config key.yaml
2 preview --config {RECIPE} --outputdir=x
2 sweep --config nope.yaml --set seed_everything=1,2
2 sweep --config {RECIPE} --set model.routing.kept=2,4
2 sweep --grid nope
2 export nope OUT
2 recipes show nope
2 init nope
2 init empty
2 init captions
2 init line
2 report nope
2 report results --out key.yaml/x
2 evaluate --config nope.yaml
2 evaluate --config key.yaml
2 evaluate --config {RECIPE}
2 evaluate --check --config task.yaml
2 evaluate --check --config arm.yaml
2 evaluate --suite maxi
2 evaluate --suite mini --out key.yaml/x
2 evaluate --data nope.json --adapter nope
2 evaluate --tasks recal --backbone checkpoints/tiny-llama
2 compare nope
2 generate --adapter nope --prompt x
2 generate --backbone checkpoints/tiny-llama --prompt x --eviction snapkw --eviction-keep 0.5
2 generate --backbone checkpoints/tiny-llama --prompt x --eviction snapkv --eviction-keep 42
2 generate --backbone checkpoints/tiny-llama --prompt x --kv-dtype int3
2 generate --backbone checkpoints/tiny-llava --prompt x --image nope.png
2 serve
2 serve --backbone nope --queue 0
2 serve --adapter nope
2 demo --adapter nope --port 0
2 benchmark --model nope
2 calibrate duo_attention --backbone nope --out x.json
2 calibrate duo --backbone nope --out x.json
2 data scense
2 diagnose --backbone checkpoints/tiny-llama
2 axes nope empty
2 budget --keep-ratio 2 --num-groups 16 --kept-groups 4
2 recommend --budget 0.001
"""


def test_what_needs_no_tensors_loads_no_torch(tmp_path):
    files = {
        "broken.yaml": "model: [1\n",
        "key.yaml": "modle: {}\n",
        "task.yaml": "{out: x, arms: [{backbone: checkpoints/tiny-llama}], tasks: [recal]}",
        "arm.yaml": "{out: x, arms: [{backbone: checkpoints/tiny-llama, evictoin: x}], tasks: [recall]}",
        "captions/a.csv": "file,caption\na.png,a dog\n",
        "line/a.txt": "one line",
        "results/a/b/manifest.json": "{}",
        "empty/.hidden": "",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    rows = [line.split() for line in NEEDS_NO_TENSORS.strip().splitlines()]
    given, command = json.dumps([words for _, *words in rows]), [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True, input=given)
    said = [line for line in done.stdout.splitlines() if line.startswith("@")]
    assert said == [f"@ {code} [] {' '.join(words)}" for code, *words in rows]
    assert done.stderr.count("\n") == sum(code == "2" for code, *_ in rows), done.stderr


BAD_INPUT = {
    "init no": ({"no/a.bin": "x"}, "1 .bin; add texts, or pictures and a table, then: "),
    "init line": ({"line/a.txt": "one line"}, "too few different documents (1), three at least; add some, then: "),
    "init absent": ({"absent/a.csv": "file,caption\nx.png,a dog\n"}, "1 of 1 images are not in absent (first: 'x.png'"),
    "init blank": ({"blank/a.csv": "question,answer\n,x\n"}, "line 2: column 'question' is empty; fill it, or drop"),
    "fit --config FILE": (
        {"FILE": RECIPE.read_text().replace("kept_groups: 4", "kept_groups: four")},
        "model.routing.kept_groups is 'four'; it must be a whole number; 'subtoken-train fit --help' lists the keys",
    ),
    "evaluate --config FILE": (
        {"FILE": "{out: x, arms: [{backbone: x}], tasks: recall}"},
        "FILE: tasks is 'recall'; it must be a list in brackets, such as [one, two]; 'subtoken-train recipes show",
    ),
    "generate --backbone checkpoints/tiny-llama --prompt x": (
        {}, "GiB of memory and no GPU; take bfloat16, or a smaller model: subtoken-train data smollm2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("line", BAD_INPUT)
def test_what_newcomers_bring_is_one_line_with_the_command_to_type_next(tmp_path, monkeypatch, capsys, line):
    monkeypatch.setattr("subtoken_train.families.load.machine_memory", lambda: 1000)
    files, words = BAD_INPUT[line]
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    said = refused(capsys, *line.split())
    assert words in said
    assert not line.startswith("init") or said.endswith(f"then: subtoken-train {line}")


COMPLETION = """
import atexit, os, sys
leave = os._exit
def seen(code):
    open(os.environ["HEAVY"], "w").write(",".join({"torch", "transformers", "lightning"} & sys.modules.keys()))
    leave(code)
os._exit = seen
from subtoken_train.cli.main import main
main()
"""


def completed(tmp_path, line):
    out, heavy = tmp_path / "out", tmp_path / "heavy"
    asked = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_STDOUT_FILENAME": str(out)}
    asked |= {"COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "9", "HEAVY": str(heavy)}
    command = [sys.executable, "-c", COMPLETION]
    done = subprocess.run(command, env={**os.environ, **asked}, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, b""), done.stderr
    assert heavy.read_text() == ""
    return {word.strip() for word in out.read_text().split("\n")}


def test_a_shell_completes(tmp_path):
    pytest.importorskip("argcomplete", reason="argcomplete (extra completion) is not installed")
    assert completed(tmp_path, "subtoken-train ") >= set(COMMANDS)
    assert completed(tmp_path, "subtoken-train ex") == {"export"}
    assert completed(tmp_path, "subtoken-train evaluate --lim") == {"--limit"}
    assert completed(tmp_path, "subtoken-train recipes sh") == {"show"}
    fit = completed(tmp_path, "subtoken-train fit --config tiny_fastv25_s16k4 --")
    assert fit >= {"--overwrite", "--anchor", "--trainer.max_steps", "--model.routing.num_groups", "--data.num_facts"}
    assert "tiny_fastv25_s16k4_anchor" in completed(tmp_path, "subtoken-train fit --config tiny_fastv25_s16k4_a")
    assert completed(tmp_path, "subtoken-train recipes show tinylm_quest25_s8k6_a") == {"tinylm_quest25_s8k6_anchor"}


def test_argcomplete_finds_the_mark():
    assert "PYTHON_ARGCOMPLETE_OK" in (ROOT / "subtoken_train/cli/main.py").read_text()[:1024]
