"""``subtoken-train recipes``: on a folder of two recipes, and on the shipped one."""

import subprocess
import sys

import pytest

from subtoken_train import resources
from subtoken_train.cli.main import main
from subtoken_train.resources import recipe_files
from tests.support.commands import refused

TINY = "# Tiny run, 15.625 % KV\n\nmodel: tiny\n"


@pytest.fixture
def library(tmp_path, monkeypatch):
    folder = tmp_path / "library"
    (folder / "recipes" / "eval").mkdir(parents=True)
    (folder / "recipes" / "tiny_a.yaml").write_text(TINY)
    (folder / "recipes" / "eval" / "b.yaml").write_text("model: x\n")
    monkeypatch.setattr(resources, "resource_root", lambda: folder)
    return folder


def test_ls_prints_names_and_first_comments(library, capsys):
    assert main(["recipes", "ls"]) == 0
    assert capsys.readouterr().out == "eval/\n  b\ntiny/\n  tiny_a  Tiny run, 15.625 % KV\n"


@pytest.mark.parametrize("name", ["tiny_a", "tiny_a.yaml", "tiny/tiny_a", "recipes/tiny_a.yaml"])
def test_show_prints_the_file(library, capsys, name):
    assert main(["recipes", "show", name]) == 0
    assert capsys.readouterr().out == TINY


def test_copy_to_a_file_and_into_a_folder(library, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["recipes", "copy", "tiny_a", "mine.yaml"]) == 0
    assert main(["recipes", "copy", "tiny_a"]) == 0
    assert (tmp_path / "mine.yaml").read_text() == (tmp_path / "tiny_a.yaml").read_text() == TINY
    assert capsys.readouterr().out == "wrote mine.yaml\nwrote tiny_a.yaml\n"


def test_copy_overwrites_only_when_told(library, tmp_path, capsys):
    target = tmp_path / "mine.yaml"
    target.write_text("mine\n")
    assert f"{target} exists; name another file, or pass --overwrite" in refused(
        capsys, "recipes", "copy", "tiny_a", str(target)
    )
    assert target.read_text() == "mine\n"
    assert main(["recipes", "copy", "tiny_a", str(target), "--overwrite"]) == 0
    assert target.read_text() == TINY


def test_copy_onto_itself_keeps_the_recipe(library):
    source = library / "recipes" / "tiny_a.yaml"
    assert main(["recipes", "copy", "tiny_a", str(source), "--overwrite"]) == 0
    assert source.read_text() == TINY


@pytest.mark.parametrize("action", ["show", "copy"])
def test_unknown_recipe_gets_the_nearest(library, capsys, action):
    assert "unknown recipe 'tiny_b'. Did you mean 'tiny_a'?" in refused(capsys, "recipes", action, "tiny_b")


def test_every_shipped_recipe_is_listed_with_a_comment(capsys):
    assert main(["recipes", "ls"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split(maxsplit=1) for line in lines if line.startswith("  ")]
    folders = [line for line in lines if not line.startswith("  ")]
    assert len(rows) == len(recipe_files())
    assert all(len(row) == 2 for row in rows), "a recipe opens with a comment that says what it is"
    assert folders == sorted({f"{name.partition('/')[0]}/" for name in recipe_files()})


def test_ls_takes_words(capsys):
    assert main(["recipes", "ls", "LLaVA-1.5-13B", "visionzip25_s4"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "llava13b/",
        "llava13b_visionzip25_s4k1",
    ]
    assert "no recipe has gpt5 and fastv in its name or first line" in refused(capsys, "recipes", "ls", "gpt5", "fastv")


def test_a_reader_that_stops_early_is_no_error():
    command = f"{sys.executable} -m subtoken_train recipes ls | head -1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 1
