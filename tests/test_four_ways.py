"""The four ways of a new user, each from an empty folder by the commands that the pages give."""

import csv
import json
import re
import subprocess
import sys

import pytest
from PIL import Image, ImageDraw

from tests.support.places import ROOT

pytestmark = pytest.mark.slow
SMOLLM2 = ROOT / "checkpoints" / "smollm2"
COLOURS = ("red", "blue", "green", "yellow")


def said(folder, *words: str, code: int = 0) -> str:
    """What a command prints, run in a folder."""
    command = [sys.executable, "-m", "subtoken_train", *words]
    done = subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True, timeout=1500)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="checkpoints/smollm2 is fetched by make real")
def test_own_texts_lead_to_a_comparison_at_equal_bytes(tmp_path):
    from subtoken_train.datasets.english import documents

    (tmp_path / "mine").mkdir()
    for number, text in enumerate([*documents("dev"), *documents("test")][:30]):
        (tmp_path / "mine" / f"{number}.txt").write_text(text)
    made = said(tmp_path, "init", "mine", "--backbone", str(SMOLLM2))
    assert "subtoken-train compare" in made
    few = ["--trainer.max_steps", "4", "--data.batch_size", "1"]
    for name in ("mine", "mine_anchor"):
        said(tmp_path, "fit", "--config", f"mine_subtoken/{name}.yaml", *few)
    printed = said(tmp_path, "compare", "runs/mine", "--contexts", "2")
    assert re.search(r"trained has .* take \w+", printed), printed
    made = tmp_path / "runs" / "mine" / "compare" / "report"
    names = {row["arm"] for row in csv.DictReader((made / "report.csv").open())}
    assert {"full", "trained", "anchor", "kvzip", "groups_by_norm"} <= names
    assert {"report.tex", "report.html"} <= {path.name for path in made.iterdir()}


def test_forty_captions_lead_to_answers_and_to_a_plan(tmp_path):
    folder = tmp_path / "shots"
    folder.mkdir()
    lines = ["file,caption"]
    for number in range(40):
        colour = COLOURS[number % 4]
        picture = Image.new("RGB", (64, 64), "white")
        ImageDraw.Draw(picture).rectangle((8 + number % 20, 10, 40, 50), fill=colour)
        picture.save(folder / f"{number:02}.png")
        lines.append(f"{number:02}.png,{colour}")
    (folder / "captions.csv").write_text("\n".join(lines))
    assert "Describe the picture." in said(tmp_path, "init", "shots", "--backbone", "tiny")
    for name in ("shots", "shots_anchor"):
        said(tmp_path, "fit", "--config", f"shots_subtoken/{name}.yaml", "--trainer.max_steps", "6")
    arms = ["--adapter", "runs/shots", "--adapter", "runs/shots_anchor"]
    given = ["--data", "shots_subtoken/test.json", "--image-folder", "shots"]
    assert "runs/shots_anchor" in said(tmp_path, "evaluate", *arms, *given)
    assert said(tmp_path, "generate", "--adapter", "runs/shots", "--image", "shots/00.png", "--prompt", "what is it ?")
    assert "GPU" in said(tmp_path, "init", "shots", "--backbone", "llava7b", "--out", "big")
    planned = said(tmp_path, "check", "--config", "big/shots.yaml")
    assert re.search(r"time .* of one H100.*\n.*\n  memory .* fits a GPU of 24 GB", planned), planned


def test_building_on_it(tmp_path):
    import subtoken_train

    assert {"SubTokenModel", "load_adapter"} & set(dir(subtoken_train))
    (tmp_path / "user.py").write_text(
        'from subtoken_train import SubTokenModel\n\nSubTokenModel.from_pretrained("x", evicton="snapkv")\n'
    )
    checked = subprocess.run([sys.executable, "-m", "mypy", "user.py"], check=False, cwd=tmp_path, capture_output=True)
    assert b"evicton" in checked.stdout
    assert checked.returncode == 1
    assert json.loads(said(tmp_path, "recipes", "schema"))["properties"]
