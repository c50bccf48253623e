"""The embedded VLM and the embedded language model are what their READMEs say, and everything else holds on them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.comparison_lists import Questions
from benchmarks.tiny_comparison import answer_recall
from subtoken_train.artifact.folder import read_adapter
from subtoken_train.datasets.collate import Collator
from subtoken_train.datasets.recall import RecallTask
from subtoken_train.datasets.records import InstructionRecords
from subtoken_train.datasets.scene_files import write_scene_split
from subtoken_train.evaluation.runner.cell import recall_prompts
from subtoken_train.evaluation.runner.data_file import answer_records, run_of
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.load import load_family
from subtoken_train.routing import RoutingConfig
from subtoken_train.types import Region
from tests.support.helpers import compress
from tests.support.places import ROOT
from tests.support.sampling import sampled

CHECKPOINTS = ROOT / "checkpoints"
QUEST = {"name": "quest", "page_size": 4, "window": 16}


@pytest.fixture(scope="module")
def dev(tmp_path_factory):
    """Held-out scenes (digits of the dev split): 36 of each short kind."""
    folder = tmp_path_factory.mktemp("scenes")
    write_scene_split(folder, "dev", 280, seed=11)
    return InstructionRecords(folder / "dev.json")


@pytest.fixture(scope="module")
def vlm():
    return load_family(BackboneConfig())


@pytest.fixture(scope="module")
def language_model():
    return load_family(BackboneConfig(path="checkpoints/tiny-llama"))


@pytest.fixture(scope="module")
def task(language_model):
    return RecallTask(language_model.tokenizer, 512, 24, 8)


def test_answers_held_out_scenes(vlm, dev):
    by_kind = answer_records(compress(vlm).eval(), dev).by_kind()
    for kind, scores in by_kind.items():
        assert np.mean(scores) >= (0.80 if kind == "count" else 0.88), kind  # of 36 questions: a floor


@pytest.mark.parametrize("kind", ["image", "text"])
@torch.no_grad()
def test_neutral_settings(kind, request):
    if kind == "image":
        family, dev = request.getfixturevalue("vlm"), request.getfixturevalue("dev")
        batch = Collator(family, 512)([dev[i] for i in range(6)])
        reducer, near = {"name": "fastv"}, 1e-5
    else:
        family = request.getfixturevalue("language_model")
        (batch,) = recall_prompts(family, 2, answers=True)
        reducer, near = QUEST, 1e-4
    mask = batch.regions_BN != Region.PADDING
    pictures = {} if batch.pixel_values is None else {"pixel_values": batch.pixel_values}
    plain = family.model(input_ids=batch.input_ids_BN, **pictures, attention_mask=mask.long(), use_cache=False).logits
    neutral = compress(family, RoutingConfig(num_groups=16, kept_groups=16), keep_ratio=1.0, **reducer).eval()
    assert torch.equal(neutral.logits(neutral.run(batch))[mask], plain[mask])
    forced = neutral.logits(neutral.run(batch, force_gather=True))
    assert (forced[mask] - plain[mask]).abs().max() < near


@sampled("name", ["tiny_fastv25_s16k4", "tiny_fastv25_s16k4_anchor", "tiny_lora_only"], every=3)
def test_shipped_adapters_load(name):
    config, _, _ = read_adapter(CHECKPOINTS / "adapters" / name)
    assert config.training["name"].startswith(name)


@pytest.mark.slow
def test_recall_with_the_whole_context_and_what_quest_costs_it(language_model, task):
    """The floor of the README's figure; untrained for it, a model that sees an eighth of the context loses facts."""
    whole = answer_recall(compress(language_model).eval(), task, Questions("test", 0, 16))
    assert np.mean(whole.scores) >= 0.95
    assert [record.id for record in whole.records] == [f"test-{i:06d}" for i in range(16)]
    quest = compress(language_model, keep_ratio=0.125, **QUEST).eval()
    answers = answer_recall(quest, task, Questions("test", 0, 16))
    assert np.mean(answers.scores) <= 0.8
    run = run_of("quest", quest, answers, b"", 512)
    assert run["visual_tokens"] == "64/512"
    assert run["nominal_kv"] == run["realised_kv"] == 0.125
