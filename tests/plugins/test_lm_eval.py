import json
import os
import subprocess
import sys

import pytest

from subtoken_train.cli.terminal import guarded
from subtoken_train.errors import pip_line
from subtoken_train.plugins import lm_eval as command

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


def test_no_harness_is_imported_unless_asked(tmp_path):
    program = (
        "import sys, subtoken_train, subtoken_train.plugins.lm_eval, subtoken_train.plugins\n"
        "from subtoken_train.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "assert not {'lm_eval', 'lmms_eval', 'torch', 'transformers'} & set(sys.modules), sorted(sys.modules)"
    )
    done = python("-c", program, folder=tmp_path)
    assert done.returncode == 0, done.stderr


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
