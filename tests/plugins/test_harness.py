"""A harness: its arguments and settings, requests in batches, what compression kept, and lm-eval's command line."""

import json
import os
import random
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from subtoken_train.cli.terminal import guarded
from subtoken_train.errors import pip_line
from subtoken_train.evictions import build_eviction
from subtoken_train.inference.cache_report import Outcome
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.model import SubTokenModel
from subtoken_train.inference.text_prompts import EncodedText, text_batch
from subtoken_train.plugins import harness
from subtoken_train.plugins import lm_eval as command
from subtoken_train.routing import RoutingConfig
from tests.support.eval_runs import MEASURED
from tests.support.helpers import compress
from tests.support.refusals import refuses, refusing
from tests.support.sampling import sampled
from tests.support.text_families import text_family


def test_values_that_a_parser_made_numbers_of_are_read():
    texts = {"backbone": "x", **EVICTED, "batch_size": "8", "context": "32"}
    got = harness.read_arguments({**texts, "eviction_keep": 0.1, "batch_size": 8, "context": 32, "revision": None})
    assert got == harness.ModelArguments(**texts)
    assert (got.query_tokens, got.settings) == (32, texts)
    assert harness.read_arguments({"backbone": "x"}).query_tokens is None
    options = {"backbone": "x", **EVICTED, "eviction_options": "window=4;kernel=3"}
    got = harness.read_arguments({**options, "prefill_chunk": 4096, "rerotate": "True"}).compression()
    assert (got.prefill_chunk, got.rerotate, got.eviction.window) == (4096, True, 4)
    assert harness.read_arguments(options).settings == options


EVICTED = {"eviction": "snapkv", "eviction_keep": "0.1"}
WRONG = [
    ({"adaptor": "x"}, "unknown model argument 'adaptor'. Did you mean 'adapter'"),
    ({"backbone": None}, "give adapter=DIR, or backbone=PATH"),
    ({"reducer": "fastv"}, "reducer and keep_ratio go together"),
    ({"reducer": "fastv", "keep_ratio": "half"}, "keep_ratio is 'half'; it must be a number"),
    ({"scope": "all"}, "eviction_keep, eviction_every, eviction_options and scope need eviction=NAME"),
    ({"eviction": "snapkv"}, "eviction=snapkv needs eviction_keep"),
    ({"selector": "random"}, "unknown model argument 'selector'"),
    ({"eviction": "snapkv", "eviction_options": "window"}, "'window' of snapkv must be written"),
    ({"byte_share": "half"}, "byte_share is 'half'; it must be a number"),
    ({"byte_share": 0.5}, "byte_share is for routers of adapter=DIR"),
    ({"protocol": "context_frist"}, "Did you mean 'context_first'"),
    ({"prefill_chunk": "0"}, "prefill_chunk=0 must be a whole number"),
    ({"rerotate": "maybe"}, "rerotate is 'maybe'; it must be true or false"),
    ({"context": "few"}, "context=few must be a whole number"),
    ({"batch_size": "auto"}, "batch_size=auto must be a whole number"),
    ({"batch_size": 0}, "batch_size=0 must be a whole number of at least 1"),
]
test_wrong_arguments_are_worded = refusing(
    WRONG, lambda given: harness.read_arguments({"backbone": "x", **given}).compression()
)


def test_a_harness_may_have_no_use_for_a_name_and_answers_in_one_process(monkeypatch):
    with pytest.raises(ValueError, match="unknown model argument 'context'"):
        harness.read_arguments({"backbone": "x", "context": 3}, unavailable=("context",))
    monkeypatch.setenv("WORLD_SIZE", "2")
    refuses("each of which would answer everything", harness.read_arguments, {"backbone": "x"})


def test_a_backbone_alone_and_an_adapter_load_with_reducer_eviction_and_dtype(vlm_adapter):
    place = {"backbone": str(vlm_adapter.parent / "backbone"), "dtype": "bfloat16", "device": "cpu"}
    evicted = {"eviction": "snapkv", "eviction_keep": "20tokens", "eviction_options": "window=4;kernel=3"}
    arguments = {**place, **evicted, "kv_dtype": "int8", "reducer": "fastv", "keep_ratio": 0.5}
    model = harness.read_arguments(arguments).model()
    assert model.backbone.family.model.dtype == torch.bfloat16
    assert (model.backbone.reducer.name, model.backbone.reducer.keep_ratio) == ("fastv", 0.5)
    assert (model.compression.keep, model.compression.unit, model.compression.kv_dtype) == (20, "tokens", "int8")
    assert (model.compression.eviction.window, model.compression.eviction.kernel) == (4, 3)
    plain = harness.read_arguments({"adapter": str(vlm_adapter), "device": "cpu"}).model()
    assert (plain.backbone.reducer.name, plain.backbone.family.model.dtype) == ("fastv", torch.float32)
    moved = harness.read_arguments({**place, "adapter": str(vlm_adapter)}).model()
    assert moved.backbone.family.model.dtype == torch.bfloat16


GREEDY = [
    ({"until": None}, (7, ())),
    ({"until": "\n", "max_gen_toks": 3, "max_tokens": 9}, (3, ("\n",))),
    ({"until": ["\n", "", "Q:"], "max_new_tokens": 5}, (5, ("\n", "Q:"))),
    ({"do_sample": False, "temperature": 0.8, "top_p": 0.9, "num_beams": 1}, (7, ())),
    ({"temperature": 0.0, "image_sizes": [3]}, (7, ())),
]
NOT_GREEDY = [
    ({"do_sample": True}, "answers are greedy"),
    ({"temperature": 0.5}, "temperature=0.5: answers are greedy"),
    ({"num_beams": 4}, "num_beams=4: answers are greedy"),
    ({"repetition_penalty": 1.2}, "repetition_penalty=1.2 does not go with greedy decoding"),
    ({"max_gen_toks": 0}, "an answer of 0 tokens"),
]


def test_greedy_settings():
    for given, wanted in GREEDY:
        assert harness.greedy_settings(given, 7, ignored=("image_sizes",)) == wanted
    for given, words in NOT_GREEDY:
        refuses(words, harness.greedy_settings, given, 7)


OUTCOME = Outcome(
    **{**MEASURED, "kv_bytes": 60, "dense_kv_bytes": 100, "region_bytes": 20, "region_dense_bytes": 50},
    keys_after=MEASURED["entries_after"],
)


def counted(compression=None, protocol="query_aware", routing=None):
    return harness.Counted(compress(text_family(), routing), compression or Compression(), protocol)


def test_sums_and_fractions():
    compression = Compression(build_eviction("snapkv"), 0.1, kv_dtype="int8")
    subject = counted(compression, routing=RoutingConfig("linear", 4, 1))
    subject.add([OUTCOME, replace(OUTCOME, kv_bytes=20, region_bytes=5, entries_after=2)])
    facts, text = subject.facts, str(subject)
    assert facts["prompts"] == 2
    assert (facts["kv_bytes"], facts["dense_kv_bytes"], facts["kv_fraction_measured"]) == (80, 200, 0.4)
    assert facts["region_fraction_measured"] == 0.25
    assert (facts["entries_before"], facts["entries_after"]) == (80, 12)
    assert text.startswith("subtoken: 2 prompts; none, S4K1 linear, snapkv 0.1 int8; protocol query_aware\n")
    assert "KV of the prompts: 80 of 200 bytes kept (40.00%)" in text
    assert "its entries, in any head: 12 of 80 (token, layer) pairs kept (15.00%)" in text
    subject.add([replace(OUTCOME, kv_bytes=330)])
    assert "KV of the prompts: 410 of 300 bytes kept (100.00% + index)" in str(subject)


def test_prompts_that_lost_a_region_are_counted_and_nothing_to_compress_is_said():
    subject = counted(Compression(build_eviction("snapkv"), 0.1, scope="all"))
    assert "no prompt was run" in str(subject)
    subject.add([OUTCOME])
    assert subject.facts["prompts_with_an_emptied_region"] == 0
    assert "nothing is left" not in str(subject)
    subject.add([replace(OUTCOME, emptied={"context": 2})])
    assert subject.facts["prompts_with_an_emptied_region"] == 1
    assert "snapkv 0.1 all: nothing is left of a whole region in some layer: context (1 of 2 prompts)" in str(subject)
    subject = counted()
    subject.add([replace(OUTCOME, region_bytes=0, region_dense_bytes=0, entries_before=0, entries_after=0)])
    assert "no prompt had anything that may be compressed" in str(subject)
    assert subject.facts["region_fraction_measured"] is None


@pytest.mark.parametrize("protocol", ["query_aware", "context_first"])
def test_an_eviction_after_the_question_is_warned_about(protocol):
    assert counted(protocol=protocol).warning() is None
    warning = counted(Compression(build_eviction("snapkv"), 0.1), protocol).warning()
    assert ("cannot change the first token" in (warning or "")) == (protocol == "query_aware")


FAMILY = text_family()


def runner(batch_size=1, compression=None, protocol="query_aware"):
    def collate(prompts):
        return text_batch(FAMILY, [EncodedText(ids, len(ids) // 2) for ids in prompts])

    arguments = harness.ModelArguments(backbone="x", batch_size=str(batch_size), protocol=protocol)
    return harness.Runner(SubTokenModel.around(compress(FAMILY), compression), arguments, collate, len)


def requests(seed=0):
    chance = random.Random(seed)

    def ids(count):
        return tuple(chance.randrange(10, 60) for _ in range(count))

    asked = [(prompt, ids(chance.randint(1, 4))) for prompt in [ids(length) for length in (9, 20, 5, 14)] * 3]
    chance.shuffle(asked)
    return asked


def dense(prompt, continuation):
    with torch.no_grad():
        logits = FAMILY.model(torch.tensor([[*prompt, *continuation]])).logits[0].log_softmax(-1)
    ends = range(len(prompt) - 1, len(prompt) + len(continuation) - 1)
    return (
        sum(logits[end, token].item() for end, token in zip(ends, continuation, strict=True)),
        all(logits[end].argmax() == token for end, token in zip(ends, continuation, strict=True)),
    )


def test_scores_come_in_order_are_those_of_the_whole_text_and_share_passes(monkeypatch):
    passes, score = [], harness.score_batch
    monkeypatch.setattr(harness, "score_batch", lambda *args, **how: passes.append(len(args[2])) or score(*args, **how))
    asked, done, subject = requests(), {}, runner(batch_size=3)
    got = subject.score(asked, done.__setitem__)
    for (value, greedy), request in zip(got, asked, strict=True):
        wanted = dense(*request)
        assert (value, greedy) == (pytest.approx(wanted[0], abs=1e-4), wanted[1])
    assert done == dict(enumerate(got))
    assert passes == [3, 1]  # twelve requests, four prompts
    assert subject.counted.prompts == 4
    assert subject.counted.facts["kv_fraction_measured"] >= 1
    monkeypatch.setattr(harness, "SHARED", 2)  # many continuations of a prompt are divided
    subject = runner(batch_size=8)
    divided = [value for value, _ in subject.score(asked, lambda *_: None)]
    assert divided == pytest.approx([value for value, _ in got], abs=1e-4)
    assert subject.counted.prompts == 8


@sampled("protocol", ["query_aware", "context_first"], every=2)
def test_the_batch_size_changes_nothing(protocol):
    asked = requests(1)
    one, eight = (runner(size, Compression(build_eviction("snapkv", window=2), keep=0.3), protocol) for size in (1, 8))
    first, other = ([*zip(*subject.score(asked, lambda *_: None), strict=True)] for subject in (one, eight))
    assert (other[0], other[1]) == (pytest.approx(first[0], abs=1e-4), first[1])
    questions = [(prompt, harness.GreedySettings(3 + len(after) % 2, ())) for prompt, after in asked]
    assert one.generate(questions, lambda *_: None) == eight.generate(questions, lambda *_: None)
    for name in ("entries_before", "entries_after", "dense_kv_bytes"):
        assert one.counted.facts[name] == eight.counted.facts[name]
    assert one.counted.facts["entries_after"] < one.counted.facts["entries_before"]


TASK = """task: local_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}\\n\\nWhich word comes next? Answer:"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
ROWS = [{"question": f"{i} " + "one two three four " * 12, "choices": [" of", " the"], "answer": 1} for i in range(4)]


def python(*arguments, folder):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    environment["HF_HOME"] = str(folder / "hub")
    words = [sys.executable, *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=240, env=environment, check=False)


def test_a_missing_harness_is_worded(monkeypatch, capsys):
    monkeypatch.setattr("subtoken_train.errors.find_spec", lambda name: None)
    assert guarded(command.main) == 2
    assert pip_line("eval") in capsys.readouterr().err


@pytest.mark.slow
def test_the_harness_command_line(text_adapter, tmp_path):
    pytest.importorskip("lm_eval")
    rows, tasks, backbone = tmp_path / "rows.jsonl", tmp_path / "tasks", text_adapter.parent / "backbone"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    tasks.mkdir()
    (tasks / "choice.yaml").write_text(TASK.format(data=rows))
    shared = ["--tasks", "local_choice", "--include_path", str(tasks), "--batch_size", "2", "--device", "cpu"]

    def run(module, model, given, name):
        chosen = ["--model", model, "--model_args", given, *shared, "--log_samples", "--output_path", tmp_path / name]
        return python("-m", module, *map(str, chosen), folder=tmp_path)

    def values(name):
        (path,) = (tmp_path / name).rglob("samples_local_choice_*.jsonl")
        rows = sorted(map(json.loads, path.read_text().splitlines()), key=lambda row: row["doc_id"])
        return [float(value) for row in rows for value, _ in row["filtered_resps"]]

    evicted = ",eviction=snapkv,eviction_keep=0.2,eviction_options=window=4,protocol=context_first"
    for name, more in (("whole", ""), ("evicted", evicted)):
        done = run("subtoken_train.plugins.lm_eval", "subtoken", f"backbone={backbone}{more}", name)
        assert done.returncode == 0, done.stderr
        assert done.stdout.index("|local_choice|") < done.stdout.index("subtoken: 4 prompts")
        (results,) = (tmp_path / name).rglob("results_*.json")
        info = json.loads(results.read_text())["config"]["subtoken"]
        assert (info["entries_after"] < info["entries_before"]) == (name == "evicted")
    done = run("lm_eval", "hf", f"pretrained={backbone}", "hf")
    assert done.returncode == 0, done.stderr
    assert values("whole") == pytest.approx(values("hf"), abs=1e-4)
    assert values("evicted") != pytest.approx(values("hf"), abs=1e-3)
    done = run("subtoken_train.plugins.lm_eval", "subtoken", f"backbone={backbone},evictoin=snapkv", "wrong")
    words = "subtoken-train: error: unknown model argument 'evictoin'. Did you mean 'eviction'?"
    assert (done.returncode, done.stderr.splitlines()[-1].startswith(words)) == (2, True)
