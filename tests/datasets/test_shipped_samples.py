"""``data/samples``: made of the embedded digits and English, small, and answered rightly by the shipped models."""

from __future__ import annotations

import csv

import numpy as np
import pytest
from PIL import Image
from transformers import AutoTokenizer

from subtoken_train import SubTokenModel
from subtoken_train.datasets.recall import RecallRecords, RecallTask, recall_accuracy
from subtoken_train.datasets.records import InstructionRecords
from subtoken_train.datasets.scenes import ask, draw_scene
from subtoken_train.evaluation.runner.data_file import answer_records
from subtoken_train.resources import resource
from tests.support.sampling import sampled

SAMPLES = resource("data/samples")
RECALL = RecallTask(AutoTokenizer.from_pretrained(resource("checkpoints/tiny-llama")), num_questions=2)


@pytest.mark.parametrize(("name", "number"), [("a.png", 5), ("b.png", 10)])
def test_pictures_are_held_out_scenes(name, number):
    scene = draw_scene(np.random.default_rng([0, 2, number]), "test")
    np.testing.assert_array_equal(np.asarray(Image.open(SAMPLES / name)), scene.pixels)


def test_the_long_text_is_a_held_out_recall_context():
    sample = RecallRecords(RECALL, "test", 2)[1].text
    prompt = list(sample.input_ids)[: sample.prompt_length]
    assert RECALL.tokenizer((SAMPLES / "long.txt").read_text().rstrip("\n"))["input_ids"] == prompt


def test_own_data_are_held_out_scenes_and_questions_about_them():
    """As ``data/README.md`` says; a JPEG is not the same to the last bit with every version of its library."""
    with (SAMPLES / "mydata/questions.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["image", "question", "answer"]
    drawn = []
    for number in range(24):
        rng = np.random.default_rng([1, 2, number])
        scene, name = draw_scene(rng, "test"), f"images/{number:02d}.jpg"
        pixels = np.asarray(Image.open(SAMPLES / "mydata" / name)).astype(int)
        assert np.abs(pixels - scene.pixels).mean() < 4
        drawn += [[name, *ask(rng, scene.objects, kind)] for kind in ("exists", "color", "read", "where", "count")]
    assert rows == drawn


@sampled("adapter", ["tiny_lora_only", "tiny_fastv25_s16k4"], every=2)
def test_the_shipped_models_answer(adapter):
    model = SubTokenModel.from_pretrained(f"checkpoints/adapters/{adapter}")
    answers = answer_records(model.backbone, InstructionRecords(SAMPLES / "questions.json"))
    assert [record.prediction for record in answers.records] == ["yes", "white 4", "white"]
    assert answers.scores == [1, 1, 1]


@sampled("keep", [1.0, 0.25], every=2)
def test_the_language_model_recalls(keep):
    model = SubTokenModel.from_pretrained("checkpoints/tiny-llama", eviction="snapkv", eviction_keep=keep)
    answer = model.chat((SAMPLES / "long.txt").read_text().rstrip("\n"), max_new_tokens=32, do_sample=False)
    assert recall_accuracy(f" {answer}", RecallRecords(RECALL, "test", 2)[1].codes) == 1
