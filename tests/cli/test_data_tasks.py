"""``subtoken-train data BENCHMARK``: where it comes from, what is there, exit code 2 where it is not whole."""

import json
from pathlib import Path

import pytest
from PIL import Image

from subtoken_train.cli.main import main
from subtoken_train.evaluation.tasks import TASKS

FROM_FILES = sorted(name for name in TASKS if TASKS[name].needs_files)
LINE = {"image": "a.png", "question": "What?", "answers": "cat", "metric": "exact_match"}


def run(capsys, *argv):
    code = main(["data", *argv])
    out, err = capsys.readouterr()
    assert err.count("\n") == (0 if code == 0 else 1)
    return code, out, err


@pytest.fixture
def questions(tmp_path):
    Image.new("RGB", (3, 2)).save(tmp_path / "a.png")
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(LINE | {"id": n}) + "\n" for n in range(3)))
    return tmp_path


@pytest.mark.parametrize("name", FROM_FILES)
def test_every_benchmark_says_where_it_comes_from(capsys, name):
    code, out, _ = run(capsys, name)
    assert code == 0
    assert TASKS[name].where in out
    assert out.endswith(f"check a folder: subtoken-train data {name} --root DIR\n")


@pytest.mark.parametrize("name", FROM_FILES)
def test_an_empty_folder_is_no_benchmark(capsys, name, tmp_path):
    code, _, err = run(capsys, name, "--root", str(tmp_path))
    assert code == 2
    assert name in err or str(tmp_path) in err


def test_a_whole_set(questions, capsys):
    code, out, _ = run(capsys, "local", "--root", str(questions))
    assert code == 0
    assert f"{questions}: 3 samples, 3 images\n  kinds: exact_match 3\n" in out
    assert "first, '0': '<image>\\nWhat?'" in out
    assert out.endswith("  3 images opened: 3 x 2, 3 x 2, 3 x 2\nreadable: 3 samples\n")


def test_a_missing_image(questions, capsys):
    (questions / "a.png").unlink()
    code, _, err = run(capsys, "local", "--root", str(questions))
    assert code == 2
    assert "1 of 1 images are missing" in err


def test_a_part_of_a_set(tmp_path, capsys):
    (tmp_path / "vt").mkdir()
    row = {"index": 0, "input": "x Question: Find all variables that are assigned the value 1", "outputs": ["A"]}
    (tmp_path / "vt" / "validation.jsonl").write_text(json.dumps(row) + "\n")
    argv = ["ruler", "--root", str(tmp_path), "--option", "tasks=[vt]"]
    code, out, err = run(capsys, *argv)
    assert code == 2
    assert "1 samples, 0 images" in out
    assert f"task ruler has 1 of 500 samples in {tmp_path}" in err
    code, out, _ = run(capsys, *argv, "--option", "rows_per_task=1")
    assert (code, out.splitlines()[-1]) == (0, "complete: 1 samples")


def test_a_part_is_enough_with_a_limit(tmp_path, capsys):
    (tmp_path / "vt").mkdir()
    row = {"input": "x Question: Find all variables that are assigned the value 1", "outputs": ["A"]}
    lines = [json.dumps({**row, "index": n}) + "\n" for n in range(3)]
    (tmp_path / "vt" / "validation.jsonl").write_text("".join(lines))
    argv = ["ruler", "--root", str(tmp_path), "--option", "tasks=[vt]", "--limit"]
    code, out, _ = run(capsys, *argv, "2")
    assert (code, out.splitlines()[-1]) == (0, "enough for a limit of 2: 2 samples")
    assert f"{tmp_path}: 3 samples" in out
    code, _, err = run(capsys, *argv, "4")
    assert code == 2
    assert "task ruler has 3 of 500 samples" in err
    code, out, _ = run(capsys, *argv, "4", "--option", "rows_per_task=3")
    assert (code, out.splitlines()[-1]) == (0, "enough for a limit of 4: 3 samples")


def test_a_limit_asks_for_no_other_images(questions, capsys):
    with (questions / "questions.jsonl").open("a") as file:
        file.write(json.dumps(LINE | {"id": 9, "image": "gone.png"}) + "\n")
    assert run(capsys, "local", "--root", str(questions), "--limit", "3")[0] == 0
    code, _, err = run(capsys, "local", "--root", str(questions), "--limit", "4")
    assert code == 2
    assert "1 of 2 images are missing" in err


def test_texts_made_on_the_spot_need_no_folder(capsys):
    code, out, _ = run(capsys, "ruler_synthetic", "--option", "tasks=[fwe]", "--option", "samples_per_task=2")
    assert code == 0
    assert "kinds: fwe 2\n" in out
    assert out.endswith("complete: 2 samples\n")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["ruler_synthetic", "--root", "x"], "task ruler_synthetic makes its samples itself; leave --root out"),
        (["pop"], "unknown data set 'pop'. Did you mean 'pope'?"),
        (["pope", "--option", "category"], "--option 'category' must be written KEY=VALUE"),
        (["pope", "--option", "categori=all"], "unknown option of task pope 'categori'. Did you mean 'category'?"),
        (["textvqa", "--option", "ocr='false'"], "option ocr of task textvqa is 'false'; it must be true or false"),
        (["mmlu", "--option", "num_fewshot='5'"], "option num_fewshot of task mmlu is '5'; it must be a whole number"),
        (["ruler", "--option", "length=true"], "option length of task ruler is True; it must be a whole number"),
        (["pope", "--file", "x"], "--file means nothing to data pope; leave it out"),
        (["scenes", "--limit", "3"], "--limit means nothing to data scenes; leave it out"),
        (["pope", "--limit", "0"], "--limit 0 must be at least 1"),
        (["scenes", "--option", "a=1"], "--option means nothing to data scenes; leave it out"),
    ],
)
def test_mistakes(capsys, argv, message):
    code, _, err = run(capsys, *argv)
    assert code == 2
    assert message in err


def test_the_page_lists_every_benchmark():
    page = (Path(__file__).resolve().parents[2] / "data" / "README.md").read_text(encoding="utf-8")
    lines = [line for line in page.splitlines() if line.startswith("| `")]
    for name, task in TASKS.items():
        (line,) = [line for line in lines if f"`{name}`" in line.split("|")[1]]
        assert task.rows is None or f"{task.rows:,}" in line, line
        assert f"`{task.primary}`" in line, line
