"""``subtoken-train data BENCHMARK``: where it comes from, what is there, exit code 2 where it is not whole."""

import json
from pathlib import Path

import pytest
from PIL import Image

from subtoken_train.evaluation.tasks import TASKS
from tests.support.commands import printed, refused

FROM_FILES = sorted(name for name in TASKS if TASKS[name].needs_files)
LINE = {"image": "a.png", "question": "What?", "answers": "cat", "metric": "exact_match"}


@pytest.fixture
def questions(tmp_path):
    Image.new("RGB", (3, 2)).save(tmp_path / "a.png")
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(LINE | {"id": n}) + "\n" for n in range(3)))
    return tmp_path


@pytest.mark.parametrize("name", FROM_FILES)
def test_every_benchmark_says_where_it_comes_from_and_an_empty_folder_is_none(capsys, name, tmp_path):
    out = printed(capsys, "data", name, silent=True)
    assert TASKS[name].where in out
    assert out.endswith(f"check a folder: subtoken-train data {name} --root DIR\n")
    line = refused(capsys, "data", name, "--root", tmp_path, reports=True)
    assert name in line or str(tmp_path) in line


def test_a_whole_set(questions, capsys):
    out = printed(capsys, "data", "local", "--root", questions, silent=True)
    assert f"{questions}: 3 samples, 3 images\n  kinds: exact_match 3\n" in out
    assert "first, '0': '<image>\\nWhat?'" in out
    assert out.endswith("  3 images opened: 3 x 2, 3 x 2, 3 x 2\nreadable: 3 samples\n")


def test_a_part_of_a_set(tmp_path, capsys):
    """It is none by itself, and enough for a limit."""
    (tmp_path / "vt").mkdir()
    row = {"input": "x Question: Find all variables that are assigned the value 1", "outputs": ["A"]}
    lines = [json.dumps({**row, "index": n}) + "\n" for n in range(3)]
    (tmp_path / "vt" / "validation.jsonl").write_text("".join(lines))
    argv = ["data", "ruler", "--root", str(tmp_path), "--option", "tasks=[vt]"]
    whole, short = ["--option", "rows_per_task=3"], f"task ruler has 3 of 500 samples in {tmp_path}"
    for limit, words in (([], "complete: 3 samples"), (["--limit", "4"], "enough for a limit of 4: 3 samples")):
        assert short in refused(capsys, *argv, *limit, reports=True)
        assert printed(capsys, *argv, *limit, *whole, silent=True).splitlines()[-1] == words
    out = printed(capsys, *argv, "--limit", 2, silent=True)
    assert f"{tmp_path}: 3 samples, 0 images" in out
    assert out.splitlines()[-1] == "enough for a limit of 2: 2 samples"


def test_a_limit_asks_for_no_other_images(questions, capsys):
    with (questions / "questions.jsonl").open("a") as file:
        file.write(json.dumps(LINE | {"id": 9, "image": "gone.png"}) + "\n")
    argv = ["data", "local", "--root", questions, "--limit"]
    printed(capsys, *argv, 3, silent=True)
    assert "1 of 2 images are missing" in refused(capsys, *argv, 4, reports=True)
    (questions / "a.png").unlink()
    assert "1 of 1 images are missing" in refused(capsys, *argv, 3, reports=True)


def test_texts_made_on_the_spot_need_no_folder(capsys):
    out = printed(
        capsys, "data", "ruler_synthetic", "--option", "tasks=[fwe]", "--option", "samples_per_task=2", silent=True
    )
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
        (["pope", "--file", "x"], "--file does not apply to data pope; leave it out"),
        (["scenes", "--limit", "3"], "--limit does not apply to data scenes; leave it out"),
        (["pope", "--limit", "0"], "--limit 0 must be at least 1"),
        (["scenes", "--option", "a=1"], "--option does not apply to data scenes; leave it out"),
    ],
)
def test_mistakes(capsys, argv, message):
    assert message in refused(capsys, "data", *argv, reports=True)


def test_the_page_lists_every_benchmark():
    page = (Path(__file__).resolve().parents[2] / "docs" / "tasks.md").read_text(encoding="utf-8")
    lines = [line for line in page.splitlines() if line.startswith("| `")]
    for name, task in TASKS.items():
        (line,) = [line for line in lines if f"`{name}`" in line.split("|")[1]]
        assert task.rows is None or f"{task.rows:,}" in line, line
        assert f"`{task.primary}`" in line, line
