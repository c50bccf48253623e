"""From a folder of captions to answers and a plan, by the commands that the pages give."""

import re
import subprocess
import sys

import pytest
from PIL import Image, ImageDraw

pytestmark = pytest.mark.slow
COLOURS = ("red", "blue", "green", "yellow")


def said(folder, *words: str, code: int = 0) -> str:
    """What a command prints, run in a folder."""
    command = [sys.executable, "-m", "subtoken_train", *words]
    done = subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True, timeout=1500)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


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
    made = said(tmp_path, "init", "shots", "--backbone", "tiny")
    assert "Describe the picture." in made
    for name in ("shots", "shots_anchor"):
        said(tmp_path, "fit", "--config", f"shots_subtoken/{name}.yaml", "--trainer.max_steps", "6")
    arms = ["--adapter", "runs/shots", "--adapter", "runs/shots_anchor"]
    given = ["--data", "shots_subtoken/test.json", "--image-folder", "shots"]
    assert "runs/shots_anchor" in said(tmp_path, "evaluate", *arms, *given)
    assert said(tmp_path, "generate", "--adapter", "runs/shots", "--image", "shots/00.png", "--prompt", "what is it ?")
    assert "GPU" in said(tmp_path, "init", "shots", "--backbone", "llava7b", "--out", "big")
    planned = said(tmp_path, "check", "--config", "big/shots.yaml")
    assert re.search(r"time .* of one H100.*\n.*\n  memory .* fits a GPU of 24 GB", planned), planned
