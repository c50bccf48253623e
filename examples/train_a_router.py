"""Train a router for a few steps on the embedded model, then ask it. A real run has 600 steps or more.

python examples/train_a_router.py
"""

import tempfile
from pathlib import Path

from PIL import Image

from subtoken_train import SubTokenModel
from subtoken_train.cli.main import main

work = Path(tempfile.mkdtemp())
scenes = work / "scenes"
assert main(["data", "scenes", "--out", str(scenes), "--train", "64", "--dev", "8", "--test", "8"]) == 0
recipe = ["--config", "tiny_fastv25_s16k4", "--data.train_file", str(scenes / "train.json")]
recipe += ["--data.image_folder", str(scenes), "--trainer.max_steps", "3", "--output_dir", str(work / "run")]
assert main(["fit", *recipe]) == 0

model = SubTokenModel.from_pretrained(work / "run")
print(model.chat("is there a 7 ?", [Image.open(scenes / "test/000000.jpg")], max_new_tokens=8))
print(model.cache_report())
