"""``subtoken-train data``: makes data sets, checks public ones and benchmarks, refuses to lose what is there."""

import json

import datasets
import pytest
from PIL import Image

from subtoken_train.cli import data
from subtoken_train.cli.main import main
from subtoken_train.datasets.english import documents
from subtoken_train.evaluation.tasks import TASKS
from tests.support.benchmark_folders import write_jsonl
from tests.support.chats import talk
from tests.support.commands import printed, refused
from tests.support.places import ROOT


def scenes(folder, *extra: str) -> list[str]:
    return ["data", "scenes", "--out", str(folder), "--train", "6", "--dev", "4", "--test", "5", *extra]


def test_three_splits_and_an_existing_folder_needs_overwrite(tmp_path, capsys):
    folder = tmp_path / "scenes"
    assert str(folder) in printed(capsys, *scenes(folder))
    counts = {split: len(json.loads((folder / f"{split}.json").read_text())) for split in ("train", "dev", "test")}
    assert counts == {"train": 6, "dev": 4, "test": 5}
    before = (folder / "train.json").read_bytes()
    assert "overwrite" in refused(capsys, *scenes(folder, "--seed", "1"))
    assert (folder / "train.json").read_bytes() == before
    assert main(scenes(folder, "--seed", "1", "--overwrite")) == 0
    assert (folder / "train.json").read_bytes() != before


def test_english_documents(tmp_path):
    assert main(["data", "english", "--out", str(tmp_path / "english")]) == 0
    lines = (tmp_path / "english" / "dev.jsonl").read_text().splitlines()
    assert [json.loads(line)["text"] for line in lines] == documents("dev")


def test_samples_are_those_of_a_checkout(tmp_path, capsys):
    """In an empty folder, where an installed package is asked as a checkout would be."""
    ask = ["generate", "--adapter", "checkpoints/adapters/tiny_lora_only", "--prompt", "is there a 7 ?"]
    words = refused(capsys, *ask, "--image", "data/samples/a.png")
    assert words.endswith("image data/samples/a.png does not exist; get it: subtoken-train data samples")
    assert "get it: subtoken-train data samples" in refused(capsys, "init", "data/samples/mydata")
    assert main(["data", "samples"]) == 0
    shipped, made = ROOT / "data/samples", tmp_path / "data/samples"
    names = [path.relative_to(shipped) for path in shipped.rglob("*") if path.is_file()]
    assert len(names) > 30
    assert all((made / name).read_bytes() == (shipped / name).read_bytes() for name in names)
    assert "exists; choose another folder or pass --overwrite" in refused(capsys, "data", "samples")


PARTS = ("coco/train2017/1.jpg", "gqa/images/2.jpg", "ocr_vqa/images/3.jpg", "vg/VG_100K/4.jpg", "vg/VG_100K_2/5.jpg")


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Six records, one of them text only, whose five images are there (one as .gif)."""
    monkeypatch.setattr(data, "MIX665K_RECORDS", 6)
    rows = [{"id": i, "image": name, "conversations": talk("<image> hi", "yes")} for i, name in enumerate(PARTS)]
    rows.append({"id": "text", "model": "", "conversations": talk("hi", "yes")})
    (tmp_path / data.MIX665K).write_text(json.dumps(rows))
    for name in PARTS:
        path = tmp_path / "images" / name.replace("3.jpg", "3.gif")
        path.parent.mkdir(parents=True)
        path.touch()
    return tmp_path


def failed(capsys, argv):
    """A check that must fail: what it prints, and its one line of stderr."""
    assert main(["data", *argv]) == 2
    out, err = capsys.readouterr()
    assert err.count("\n") == 1
    return out, err


def files_below(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_a_complete_set(root, capsys):
    before, out = files_below(root), printed(capsys, "data", "llava665k", "--root", str(root))
    assert "train2017.zip" in out
    assert f"{root / data.MIX665K}: 6 records, 1 without an image" in out
    assert "coco/train2017          1 named, all there\n" in out
    assert "ocr_vqa/images          1 named, all there, 1 under another suffix\n" in out
    assert out.endswith("complete: 6 records, 5 images\n")
    assert files_below(root) == before


def test_missing_images_are_counted_listed_and_written_on_request(root, capsys, tmp_path):
    for name in ("coco/train2017/1.jpg", "vg/VG_100K/4.jpg"):
        (root / "images" / name).unlink()
    argv, listed = ["llava665k", "--root", str(root), "--missing-list"], tmp_path / "list.txt"
    out, err = failed(capsys, [*argv, str(listed)])
    assert "1 named, 1 missing\n    coco/train2017/1.jpg\n" in out
    assert "2 of 5 images" in err
    assert listed.read_text() == "coco/train2017/1.jpg\nvg/VG_100K/4.jpg\n"
    listed.write_text("mine")
    assert "list.txt exists" in failed(capsys, [*argv, str(listed)])[1]
    assert listed.read_text() == "mine"
    failed(capsys, [*argv, str(listed), "--overwrite"])
    assert listed.read_text() != "mine"


def test_another_number_of_records_and_none(root, tmp_path_factory, capsys, monkeypatch):
    monkeypatch.setattr(data, "MIX665K_RECORDS", 665_298)
    _, err = failed(capsys, ["llava665k", "--root", str(root)])
    assert "holds 6 records, not the 665,298 of LLaVA-v1.5's mix665k; fetch it again" in err
    out, err = failed(capsys, ["llava665k", "--root", str(tmp_path_factory.mktemp("none"))])
    assert "hf download liuhaotian/LLaVA-Instruct-150K" in out
    assert "does not exist" in err


def test_wikitext(tmp_path, capsys, monkeypatch):
    """A small set laid out as the public one."""
    monkeypatch.setattr(data, "WIKITEXT_ROWS", {"train": 6, "validation": 1, "test": 1})
    folder = tmp_path / data.WIKITEXT
    folder.mkdir()
    for name in ("train-00000-of-00002", "train-00001-of-00002", "validation-00000-of-00001", "test-00000-of-00001"):
        rows = [" = A title = \n", " words \n", "\n"] if name.startswith("train") else [" words \n"]
        datasets.Dataset.from_dict({"text": rows}).to_parquet(folder / f"{name}.parquet")
    out = printed(capsys, "data", "wikitext103", "--root", tmp_path)
    assert "train               6 rows in 2 files\n" in out
    assert f"train: {{name: {folder}, documents: wikitext}}" in out
    argv, shard = ["wikitext103", "--root", str(tmp_path)], folder / "train-00001-of-00002.parquet"
    shard.unlink()
    assert "has 1 of 2 files of the split train; fetch it: hf download" in failed(capsys, argv)[1]
    shard.write_bytes(b"no parquet")
    assert "cannot be read as Parquet" in failed(capsys, argv)[1]
    datasets.Dataset.from_dict({"text": ["a"]}).to_parquet(shard)
    assert "split train: 4 rows, not 6; fetch it again" in failed(capsys, argv)[1]


LINE = {"image": "a.png", "question": "What?", "answers": "cat", "metric": "exact_match"}


@pytest.mark.parametrize("name", sorted(name for name in TASKS if TASKS[name].needs_files))
def test_every_benchmark_says_where_it_comes_from_and_an_empty_folder_is_none(capsys, name, tmp_path):
    out = printed(capsys, "data", name, silent=True)
    assert TASKS[name].where in out
    assert out.endswith(f"check a folder: subtoken-train data {name} --root DIR\n")
    line = refused(capsys, "data", name, "--root", tmp_path, reports=True)
    assert name in line or str(tmp_path) in line


def test_a_whole_set(tmp_path, capsys):
    Image.new("RGB", (3, 2)).save(tmp_path / "a.png")
    write_jsonl(tmp_path, "questions.jsonl", [LINE | {"id": n} for n in range(3)])
    out = printed(capsys, "data", "local", "--root", tmp_path, silent=True)
    assert f"{tmp_path}: 3 samples, 3 images\n  kinds: exact_match 3\n" in out
    assert "first, '0': '<image>\\nWhat?'" in out
    assert out.endswith("  3 images opened: 3 x 2, 3 x 2, 3 x 2\nreadable: 3 samples\n")


def test_a_part_of_a_set(tmp_path, capsys):
    """It is none by itself, and enough for a limit."""
    row = {"input": "x Question: Find all variables that are assigned the value 1", "outputs": ["A"]}
    write_jsonl(tmp_path, "vt/validation.jsonl", [{**row, "index": n} for n in range(3)])
    argv = ["data", "ruler", "--root", str(tmp_path), "--option", "tasks=[vt]"]
    whole, short = ["--option", "rows_per_task=3"], f"task ruler has 3 of 500 samples in {tmp_path}"
    for limit, words in (([], "complete: 3 samples"), (["--limit", "4"], "enough for a limit of 4: 3 samples")):
        assert short in refused(capsys, *argv, *limit, reports=True)
        assert printed(capsys, *argv, *limit, *whole, silent=True).splitlines()[-1] == words
    out = printed(capsys, *argv, "--limit", 2, silent=True)
    assert f"{tmp_path}: 3 samples, 0 images" in out
    assert out.splitlines()[-1] == "enough for a limit of 2: 2 samples"


def test_texts_made_on_the_spot_need_no_folder(capsys):
    out = printed(
        capsys, "data", "ruler_synthetic", "--option", "tasks=[fwe]", "--option", "samples_per_task=2", silent=True
    )
    assert "kinds: fwe 2\n" in out
    assert out.endswith("complete: 2 samples\n")


def test_the_page_lists_every_benchmark():
    page = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
    lines = [line for line in page.splitlines() if line.startswith("| `")]
    for name, task in TASKS.items():
        (line,) = [line for line in lines if f"`{name}`" in line.split("|")[1]]
        assert task.rows is None or f"{task.rows:,}" in line, line
        assert f"`{task.primary}`" in line, line
