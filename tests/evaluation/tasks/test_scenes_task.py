"""The embedded models' own tasks: scenes by the style of a benchmark, and key-value recall."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from subtoken_train.datasets.scene_files import write_scene_split
from subtoken_train.evaluation.tasks import build_task
from subtoken_train.resources import resource
from tests.support.vqa_cases import refused

STYLES = ("pope", "textvqa", "gqa", "mmbench", "caption")


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scenes")
    write_scene_split(folder, "test", 100, seed=1)
    return folder


def test_every_record_is_in_one_task(scenes):
    samples = [sample for style in STYLES for sample in build_task(f"scenes_{style}", scenes).samples()]
    assert sorted(sample.id for sample in samples) == [f"test-{i:06d}" for i in range(100)]
    assert {sample.kind for sample in samples} == {
        "exists", "exists_color", "read", "color", "where", "count", "choice", "describe", "list",
    }  # fmt: skip


def test_a_sample(scenes):
    sample = build_task("scenes_pope", scenes).samples()[0]
    assert sample.prompt.startswith("<image>\nis there a ")
    assert sample.reference["answer"] in ("yes", "no")
    assert sample.images == (scenes / "test" / f"{sample.id.removeprefix('test-')}.jpg",)


def test_captions_are_scored_by_their_objects(scenes):
    metric = build_task("scenes_caption", scenes).metric()
    reference = {"answer": "A1 yellow 6 A4 green 2", "kind": "describe"}
    assert metric.score("A4 green 2 A1 yellow 6", reference) == 1
    assert metric.score("A1 yellow 6", reference) == pytest.approx(2 / 3)


def test_without_a_folder_it_says_how_to_make_one():
    refused("subtoken-train data scenes", "scenes_gqa")


def test_recall_is_text_with_its_context_marked():
    task = build_task("recall", contexts=12, context_length=256, num_facts=10, num_questions=3)
    samples = task.samples()
    assert [sample.id for sample in samples] == [f"test-{i:06d}" for i in range(12)]
    tokenizer = AutoTokenizer.from_pretrained(resource("checkpoints/tiny-llama"))
    for sample in samples:
        context, question = sample.prompt[: sample.context_characters], sample.prompt[sample.context_characters :]
        assert question.startswith("\nCodes of ")
        assert len(sample.reference["codes"]) == 3
        assert all(f" Code {name} {code}." in context for name, code in sample.reference["codes"].items())
        assert abs(len(tokenizer(context)["input_ids"]) - 256) <= 3
    assert len({sample.max_new_tokens for sample in samples}) == 1
    assert [sample.prompt for sample in task.samples()] == [sample.prompt for sample in samples]


def test_recall_takes_a_split_and_a_seed():
    first, second = (
        build_task(
            "recall", contexts=2, context_length=256, num_facts=10, num_questions=3, split="dev", seed=seed
        ).samples()
        for seed in (0, 1)
    )
    assert [sample.id for sample in first] == [sample.id for sample in second] == ["dev-000000", "dev-000001"]
    assert {sample.prompt for sample in first}.isdisjoint(sample.prompt for sample in second)
