"""Command lines that are refused: input -> words of the one line that says so. Nothing is loaded, nothing is left."""

import importlib.util
import shlex

import pytest

from subtoken_train.errors import pip_line
from tests.support.commands import refused
from tests.support.places import ROOT

CHECKPOINTS = ROOT / "checkpoints"
PLACES = {
    "vlm": CHECKPOINTS / "adapters/tiny_fastv25_s16k4", "lm": CHECKPOINTS / "adapters/tinylm_quest25_s16k12",
    "llava": CHECKPOINTS / "tiny-llava", "llama": CHECKPOINTS / "tiny-llama",
    "data": ROOT / "data/samples/questions.json",
}  # fmt: skip
TINY = "--config tiny_fastv25_s16k4"
STAGE2 = f"{TINY} --model.stage2.adapter={{vlm}}"
BUDGET, ASK = "--keep-ratio .25 --num-groups 16 --kept-groups 4", "--adapter {vlm} --prompt hi"
SIZED, MEASURED = f"{BUDGET} --model llava-1.5-7b", "is outside what was measured on Qwen2.5-Coder-0.5B and SmolLM2"
FASTV, PREFIXKV = "--reducer fastv --keep-ratio 0.5", "prefixkv --out made.json --backbone {llama}"
THRESHOLD, KVZAP = "threshold --out made.json --backbone {llama}", "kvzap --out made.json --backbone {llama}"
FILES = "--adapter {vlm} --prompts p.jsonl --output"
REFUSED = {
    "": {
        "bugdet": "Did you mean 'budget'?", "--versoin": "Did you mean '--version'?",
        "budget": "required: --keep-ratio, --num-groups, --kept-groups; or --eviction-keep, or --kv-dtype (see 'subt",
    },
    "axes": {
        "{llama} new --dtype bfloat61": "bfloat16", "{llama} new --samples 0": "--samples is 0",
        "{vlm} new": "is an adapter; name its backbone", "{llama} new --data missing.txt": "check the path",
    },
    "benchmark": {
        "--adapter {vlm} --backbone {llama}": "tiny-llama",
        "--adapter {lm} --lengths 1024": "need 1056 positions and the model has 1024",
        "--adapter {vlm} --lengths 83 0": "--lengths 0 must be at least 1",
        "--adapter {vlm} --lengths 60": "give at least 83",
        "--model {llama} --table8": "--table8 is about a prompt with an image",
        "--model {llava} --table8 --lengths 99": "--lengths is set by --table8",
        "--model {llava} --table8 --kv-dtype int8": "--kv-dtype is set by",
        "--model {llama} --table8 --peak-memory": "are protocols of their own",
        "--model {llama} --peak-memory --pairs 9": "--pairs is set by --peak-memory",
        "": "give one of --adapter DIR, --config RECIPE and --model PATH; got none",
        "--adapter {vlm} --model {llava}": "got --adapter and --model",
        "--model {vlm}": "is an adapter; write --adapter",
        "--model {llava} --backbone {llava}": "write --model for a backbone alone",
        f"--adapter {{vlm}} {FASTV}": "its own reducer and routers",
        f"--config tiny_fastv25_s16k4 {FASTV}": "--reducer is not read: the recipe",
        "--adapter {vlm} --byte-share 0.5": "s16k4 spends no byte budget; leave it out",
        "--model {llama} --byte-share 0.5": "--byte-share is for routers of --adapter DIR",
        "--adapter {vlm} --out {vlm}/README.md": "exists; name another file",
    },
    "budget": {
        f"{SIZED} --tokens 576 --keep-ratio 1.5": "keep_ratio=1.5 must lie in (0, 1]",
        f"{SIZED} --tokens 576 --keep-ratio nan": "keep_ratio=nan must lie in (0, 1]",
        f"{SIZED} --tokens 576 --kept-groups 17": "kept_groups=17 must lie between 1 and num_groups=16",
        f"{SIZED} --tokens 576 --num-groups 48": "num_groups=48 does not divide the value width 4096",
        f"{SIZED} --tokens 576 --num-groups 24": "choose a divisor such as 4, 8, 16, 32",
        f"{SIZED} --tokens 0": "--tokens 0 must be at least 1", f"{BUDGET} --tokens 576": "--tokens needs --model",
        f"{BUDGET} --tokens 576 --model llava-7b": "unknown model 'llava-7b'. Did you mean 'llava-1.5-7b'?",
        "--kv-dtype int8": "needs --model and --tokens", f"{BUDGET} --kv-dtype int8": "counted of whole values here",
        f"{BUDGET} --modle=llava-1.5-7b": "Did you mean '--model'?",
        "--keep-ration .25": "Did you mean '--keep-ratio'?",
    },
    "calibrate": {
        "nope --out made.json --backbone {llama}": "unknown method that is calibrated 'nope'",
        "prefixkv --out made.json": "give --adapter DIR, or --backbone PATH",
        f"{PREFIXKV} --option samples=0": "prefixkv samples is 0",
        f"{PREFIXKV} --option samples=x": "prefixkv samples",
        f"{PREFIXKV} --option sample=3": "unknown option of prefixkv 'sample'. Did you mean",
        f"{PREFIXKV} --option samples": "must be written key=value",
        "duo_attention --out made.json --backbone {llama} --option learning_rate=nan": "duo_attention learning_rate",
        "prefixkv --out made.json --backbone nowhere/at/all": "nowhere/at/all",
        f"{THRESHOLD} --option keep=1": "threshold keep=1 must lie between 0 and 1",
        f"{THRESHOLD} --option eviction=h2o": "'h2o' with these settings takes no threshold",
        f"{THRESHOLD} --option eviction_options=chunks=3": "unknown setting of kvzip 'chunks'",
        f"{PREFIXKV} --data english": "calibrated on 'recall'", f"{KVZAP} --option normalise=1": "normalise",
        f"{KVZAP} --data no.txt": "neither 'recall' nor a file",
        "headkv --out made.json --backbone {llava}": "the backbone sees images; use sparsemm",
        "sparsemm --out made.json --backbone {llama}": "the backbone sees none; use headkv",
    },
    "check": {
        f"--offline {TINY} --model.backbone.image_aspect_ratio=pad": "remove image_aspect_ratio",
        f"--offline {TINY} --model.routing.num_groups=48": "num_groups=48",
        f"--offline {TINY} --model.lora.rank=null": "model.lora.rank is null; give it a value, or leave the key out",
        "--offline --config llama7b_quest25_s8k7 --model.backbone.path llava-hf/llava-1.5-7b-hf --model.reducer.name "
        "fastv": "llava reads images, but data names text without any",
        f"{STAGE2}_anchor --model.routing.kept_groups=8": "reducer.keep_ratio 0.15625 (the",
        f"{STAGE2}_anchor --model.reducer.keep_ratio=0.15625 --model.reducer.round_up=true --model.lora.rank=4": (
            "lora.rank 8 (the recipe has 4)"
        ),
        STAGE2: "already has routers (S16K4 linear)",
    },
    "data": {
        "scenes --out x --seed -1": "--seed is -1; it must be 0 to",
        "llava665k": "data llava665k needs the folder to check: --root PATH",
        "images --root .": "data images needs the data file that names the images: --file PATH",
        "wikitext103 --root . --file x": "--file does not apply to data wikitext103; leave it out",
        "scenes --missing-list x": "--missing-list does not apply to data scenes",
        "ruler_synthetic --root x": "task ruler_synthetic makes its samples itself; leave --root out",
        "pop": "unknown data set 'pop'. Did you mean 'pope'?",
        "pope --option category": "--option 'category' must be written KEY=VALUE",
        "pope --option categori=all": "unknown option of task pope 'categori'. Did you mean 'category'?",
    },
    "demo": {
        "": "name an adapter (--adapter DIR), or a backbone", "--adapter nowhere": "nowhere is not an adapter folder",
        "--adapter {vlm} --port 70000": "--port is 70,000; it must be 1 to 65,535",
        "--adapter {vlm} --ancor x": "Did you mean '--anchor'?",
    },
    "compare": {
        "{llama}x": "tiny-llamax does not exist; did you mean /", "{llava}": "compare is for language models; of",
        "zz": "zz does not exist; check its spelling",
    },
    "diagnose": {
        "--data {data} --adapter {vlm} --eviction snapkv": "--eviction snapkv needs --eviction-keep",
        "--data {data} --adapter {vlm} --eviction-keep 0.1": "need --eviction NAME, for instance snapkv",
        "--data {data} --adapter {vlm} --protocol query_aware": "--protocol needs --eviction NAME",
        "--data {data} --adapter nowhere": "not an adapter folder",
        "--data {data} --backbone {llava}": "a backbone alone has no routers to show: add --eviction NAME, for",
    },
    "evaluate": {
        "--tasks popp --adapter {vlm} --out x": "unknown task 'popp'. Did you mean 'pope'",
        "--tasks recall --out x": "give --adapter DIR, or --backbone PATH",
        "--suite mini --out x --adapter {vlm}": "--adapter does not apply to --suite",
        "--suite mini --device cuda:77 --out mini": "unknown device of this machine 'cuda:77'",
        "--config nowhere.yaml --kv-dtype int8": "--kv-dtype does not apply to --config",
        "--config nowhere.yaml": "grid nowhere.yaml is not a file.",
        "--config tiny_fastv25_s16k3": "Did you mean 'tiny_fastv25_s16k4.yaml'?",
        "--data x.json --anchors none --adapter {vlm}": "--anchors does not apply to --data",
        "--data . --adapter {vlm}": "data file . is a folder; name a file",
        "--tasks recall --max-new-tokens 3 --out x": "--max-new-tokens does not apply to --tasks",
        "--config table1_llava7b --price 2": "--price needs --check, which predicts the GPU hours",
    },
    "fit": {
        "": "fit needs --config RECIPE: see 'subtoke", "--trainer.max_steps 3": "no recipe is given; pass one with --c",
        f"{TINY} --max_steps=3": "unknown option '--max_steps'. Did you mean '--trainer.max_steps'?",
        f"{TINY} --zzz 3": "unknown option '--zzz'. 'subtoken-train fit --help' lists the keys",
        f"{TINY} --model.optimizer.router_learning_rate abc": "model.optimizer.router_learning_rate is 'abc'; it must",
        f"{TINY} --model.routing false": "model.routing is 'false'; it must be a group of keys or null",
        f"{TINY} --model.reducer fastv": "model.reducer is 'fastv'; it must be a group of keys",
        f"{TINY} --model.routing.features norm": "model.routing.features is 'norm'; it must be a list in brackets",
        f"{TINY} --model.reducer.window 9": "unknown option '--model.reducer.window'. Allowed in model.reducer:",
        f"{TINY} --model.reducer.name visionzip --model.reducer.layer 2": (
            "unknown option '--model.reducer.layer'. Allowed in model.reducer: keep_ratio, matches, name, round_up"
        ),
        f"{TINY} --data.batch_size": "--data.batch_size needs a value",
        f"{TINY} --overwrite=maybe": "overwrite is 'maybe'; it must be true or false",
        f"{TINY} more": "unexpected argument 'more'; options start with --",
        f"{TINY} a.yaml": "unexpected argument 'a.yaml'; a recipe is passed as --config a.yaml",
        "--config tiny_fastv25_s16k3": "recipe tiny_fastv25_s16k3 is not a file. Did you mean 'tiny_fastv25_s16k4.y",
        "--config mine/tiny_fastv25_s16k4.yaml": "is not a file. Did you mean 'tiny_fastv25_s16k4.yaml'?",
        "--config zzzzzz": "is not a file. 'subtoken-train recipes ls' lists the shipped ones",
    },
    "generate": {
        f"{ASK} --max-new-tokens 0": "--max-new-tokens 0 must be at least 1",
        f"{ASK} --temperature -1": "--temperature -1.0 must be 0 (greedy) or more",
        f"{ASK} --show-layers 0": "--show-layers needs --show FILE",
        f"{ASK} --show a.png": "--show draws the visual tokens of one image, and 0 are given",
        f"{ASK} --show a.gif --image a": "--show a.gif must end in .png",
        f"{ASK} --image nowhere.png": "image nowhere.png does not exist; check the path",
        f"{ASK} --eviction-keep 0.5": "--eviction-keep, --eviction-every, --eviction-option and --scope need",
        f"{ASK} --eviction snapkv": "--eviction snapkv needs --eviction-keep, for instance 0.1, 256tokens or 20MB",
        f"{ASK} --reducer fastv": "--reducer and --keep-ratio go together",
        f"{FILES[:-9]}": "--prompts needs --output FILE.jsonl beside --prompts FILE.jsonl",
        "--adapter {vlm} --output o.jsonl": "--output needs --prompts FILE.jsonl beside --output FILE.jsonl",
        f"{ASK} --batch-size 2": "--batch-size needs --prompts FILE.jsonl",
        f"{FILES} o.txt": "--output o.txt must end in .jsonl",
        f"{FILES} ./p.jsonl": "is the file of the prompts; name another",
        f"{FILES} o.jsonl --prompt x": "--prompt is for a single prompt",
        f"{FILES} o.jsonl": "p.jsonl is missing or cannot be read",
        "--backbone {llama}x --prompt hi": "tiny-llamax' does not exist; did you mean /",
        "--backbone checkpoints/tiny-lama --prompt hi": "does not exist; did you mean checkpoints/tiny-llama?",
        "--adapter {vlm}": "give --prompt TEXT, or --prompts FILE.jsonl with --output FILE.jsonl",
        "{llama} --prompt hi": "tiny-llama; a model follows --backbone or --adapter",
    },
    "preview": {
        f"{TINY} --count 0": "--count 0 must be at least 1", f"{TINY} --count": "argument --count: expected one arg",
        f"{TINY} --data.train_file nowhere.json": "nowhere.json does not exist",
    },
    "recipes": {
        "": "required: ACTION", "shwo x": "Did you mean 'show'?", "copy x --overwrit": "Did you mean '--overwrite'?",
    },
    "recommend": {
        **{f"--budget={budget}": f"{MEASURED}-135M: give " for budget in ("0.05", "1.01", "nan")},
        "--budget 0.2 --model smolm2": "Did you mean 'smollm2'?",
    },
    "report": {"{data}": "report reads the folders that --tasks, --config and --suite write"},
    "serve": {
        "": "give --adapter DIR, or --backbone PATH", "--backbone {llama} --queue 0": "--queue 0 must be at least 1",
        "--backbone {llama} --timeout 0": "--timeout is 0.0; it must be 1 to 86,400",
        "--backbone {llama} --contexts nowhere": "--contexts nowhere is not a folder",
        "--backbone {llama} --allow-eviction knrm": (
            "unknown eviction of --allow-eviction 'knrm'. Did you mean 'knorm'?"
        ),
        "--backbone {llama} --allow-keep 0.1,0.5": "--allow-keep needs --allow-eviction NAMES",
        "--backbone {llama} --allow-eviction knorm --allow-keep 0.5": "--allow-keep 0.5 must be two shares",
        "--backbone {llama} --max-body 20": "--max-body 20 must be bytes, for instance 20MB",
        "--backbone {llama} --contexts-per-key": "--contexts-per-key needs --api-key-file FILE",
        "--backbone {llama} --allow-origin example.org/x": "example.org/x must be an origin, as https://example.org",
    },
    "sweep": {
        **{f"{TINY} --set {text}": "must be KEY=VALUE,VALUE, for" for text in ("a", "=1", "a=1,,2")},
        f"{TINY} --set data.seed=1 --set data.seed=2": "data.seed is given twice",
        f"{TINY} --set a=1,1": "two runs would share the folder a=1",
        f"{TINY} --set output_dir=x": "--output_dir DIR moves all of them",
        f"{TINY} --set model.routing.kept_group=2,4": (
            "unknown option '--model.routing.kept_group'. Did you mean '--model.routing.kept_groups'?"
        ),
        f"{TINY} --set data.batch_size=8,many": "data.batch_size is 'many'; it must be a whole",
        f"{TINY} --set model.routing.num_groups=16,7": "num_groups=7: num_groups=7",
        TINY: "a sweep needs --config RECIPE and --set KEY=A,B, or --grid",
        "--grid grid.yaml --set a=1": "--set does not apply to --grid",
        "--grid grid.yaml --output_dir x": "--output_dir does not apply to --grid",
        "--grid tabel1_llava7b": "Did you mean 'table1_llava7b.yaml'?",
        **{f"--grid table1_llava7b --price={text}": f"--price: '{text}' is not a price; give what a GPU costs an hour"
           for text in ("free", "-1", "0", "inf", "nan")},
    },
}  # fmt: skip
LINES = [(f"{command} {rest}".strip(), words) for command, lines in REFUSED.items() for rest, words in lines.items()]


@pytest.mark.parametrize(("line", "words"), LINES, ids=[line for line, _ in LINES])
def test_it_is_refused_in_these_words(tmp_path, capsys, monkeypatch, line, words):
    command, *_ = line.split()
    if command == "sweep":
        monkeypatch.setattr("subprocess.Popen", None)
    if command == "demo":  # with or without Gradio
        monkeypatch.setattr("subtoken_train.errors.find_spec", lambda name: name)
    if command in ("benchmark", "demo", "serve"):
        for place in ("families.load.load_weights", "inference.pool.load_family"):
            monkeypatch.setattr(f"subtoken_train.{place}", lambda *_, **__: pytest.fail("weights were read"))
    argv = [word.format(**PLACES) for word in shlex.split(line)]
    assert words in refused(capsys, *argv, reports=command in ("check", "data", "preview"))
    assert {path.name for path in tmp_path.iterdir()} <= {"x"}


MISSING = {
    "serve --backbone {llama}": ("starlette", "serve"), "demo --adapter {vlm}": ("gradio", "demo"),
    "report .": ("matplotlib", "report"), "diagnose --adapter any": ("matplotlib", "report"),
}  # fmt: skip


@pytest.mark.parametrize("line", MISSING)
def test_what_is_not_installed_is_named_with_its_extra(capsys, monkeypatch, line):
    (package, extra), find = MISSING[line], importlib.util.find_spec
    monkeypatch.setattr("subtoken_train.errors.find_spec", lambda name: None if name == package else find(name))
    argv = line.format(**PLACES).split()
    assert f"needs {package}, which is not installed: {pip_line(extra)}" in refused(capsys, *argv)
    if argv[0] == "report":  # nothing is drawn in a table
        assert package not in refused(capsys, *argv, "--format", "csv")


OF_PATHS = (
    "init {path} --out out", "init {path}", "fit --config {path}", "fit --config tinylm_quest25 --output_dir {path}",
    "generate --backbone checkpoints/tiny-llama --prompts {path} --output out.jsonl", "report {path}",
    "evaluate --adapter {path} --data {path}", "export {path} out", "recipes copy tinylm_compactor25 {path}/x.yaml",
)  # fmt: skip


@pytest.mark.parametrize("line", OF_PATHS)
def test_paths_that_lead_nowhere_are_one_line(tmp_path, capsys, line):
    (tmp_path / "loop").symlink_to("loop")
    for path in ("loop", "x" * 300, "nul\0x"):
        said = refused(capsys, *line.format(path=path).split(" "), reports=True)
        assert said.isprintable()
        assert len(said) < 430
        assert [each.name for each in tmp_path.iterdir()] == ["loop"]
