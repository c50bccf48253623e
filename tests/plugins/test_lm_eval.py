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
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "choice.yaml").write_text(TASK.format(data=tmp_path / "rows.jsonl"))
    backbone = text_adapter.parent / "backbone"
    shared = ["--tasks", "local_choice", "--include_path", str(tasks), "--batch_size", "2", "--device", "cpu"]
    log = ["--log_samples", "--output_path"]

    def values(folder):
        (path,) = folder.rglob("samples_local_choice_*.jsonl")
        rows = sorted(map(json.loads, path.read_text().splitlines()), key=lambda row: row["doc_id"])
        return [float(value) for row in rows for value, _ in row["filtered_resps"]]

    evicted = ",eviction=snapkv,eviction_keep=0.2,eviction_options=window=4,protocol=context_first"
    arms = {"whole": "", "evicted": evicted}
    for name, more in arms.items():
        chosen = ["--model", "subtoken", "--model_args", f"backbone={backbone}{more}"]
        words = [*chosen, *shared, *log, str(tmp_path / name)]
        done = python("-m", "subtoken_train.plugins.lm_eval", *words, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "|local_choice|" in done.stdout
        assert done.stdout.index("local_choice") < done.stdout.index("subtoken: 4 prompts")
        (results,) = (tmp_path / name).rglob("results_*.json")
        info = json.loads(results.read_text())["config"]["subtoken"]
        assert (info["entries_after"] < info["entries_before"]) == (name == "evicted")
    plain = ["--model", "hf", "--model_args", f"pretrained={backbone}"]
    done = python("-m", "lm_eval", *plain, *shared, *log, str(tmp_path / "hf"), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    wanted = values(tmp_path / "hf")
    assert values(tmp_path / "whole") == pytest.approx(wanted, abs=1e-4)
    assert values(tmp_path / "evicted") != pytest.approx(wanted, abs=1e-3)
    wrong = ["--model", "subtoken", "--model_args", f"backbone={backbone},evictoin=snapkv"]
    done = python("-m", "subtoken_train.plugins.lm_eval", *wrong, *shared, folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(
        "subtoken-train: error: unknown model argument 'evictoin'. Did you mean 'eviction'?"
    )
