"""The embedded language model is what its README says: size, recall with full KV, neutral settings, Quest's cost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.comparison_lists import Questions
from benchmarks.tiny_comparison import answer_recall
from subtoken_train.datasets.recall import RecallRecords, RecallTask
from subtoken_train.datasets.text_batches import collate_text, padding_id
from subtoken_train.evaluation.runner.data_file import RunRecord
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.load import load_family
from subtoken_train.routing import RoutingConfig
from subtoken_train.types import Region
from tests.support.helpers import compress

FOLDER = Path(__file__).resolve().parents[1] / "checkpoints" / "tiny-llama"
QUEST = {"name": "quest", "page_size": 4, "window": 16}


@pytest.fixture(scope="module")
def family():
    return load_family(BackboneConfig(path="checkpoints/tiny-llama"))


@pytest.fixture(scope="module")
def task(family):
    return RecallTask(family.tokenizer, 512, 24, 8)


def test_size():
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 8e6


@pytest.mark.slow
def test_recall_with_the_whole_context_and_what_quest_costs_it(family, task):
    """The floor of the README's figure; untrained for it, a model that sees an eighth of the context loses facts."""
    whole = answer_recall(compress(family).eval(), task, Questions("test", 0, 16))
    assert np.mean(whole.scores) >= 0.95
    assert [record.id for record in whole.records] == [f"test-{i:06d}" for i in range(16)]
    quest = compress(family, keep_ratio=0.125, **QUEST).eval()
    answers = answer_recall(quest, task, Questions("test", 0, 16))
    assert np.mean(answers.scores) <= 0.8
    record = RunRecord.of("quest", quest, answers, b"", 512)
    assert record.visual_tokens == "64/512"
    assert record.nominal_kv == record.realised_kv == 0.125


def test_answers_do_not_depend_on_the_batch(family, task):
    routing = RoutingConfig(num_groups=16, kept_groups=8, budget="global", query_conditioned=True)
    routed = compress(family, routing, keep_ratio=0.5, **QUEST).eval()
    asked = Questions("test", 0, 4)
    together, alone = (answer_recall(routed, task, asked, batch_size=size).records for size in (4, 1))
    assert [(r.id, r.prediction, r.score) for r in together] == [(r.id, r.prediction, r.score) for r in alone]


@torch.no_grad()
def test_neutral_settings(family, task):
    records = RecallRecords(task, "dev", 2)
    batch = collate_text([records[i].text for i in range(2)], padding_id(family.tokenizer))
    mask = batch.regions_BN != Region.PADDING
    plain = family.model(input_ids=batch.input_ids_BN, attention_mask=mask.long(), use_cache=False).logits
    routing = RoutingConfig(num_groups=16, kept_groups=16)
    neutral = compress(family, routing, keep_ratio=1.0, **QUEST).eval()
    assert torch.equal(neutral.logits(neutral.run(batch))[mask], plain[mask])
    forced = neutral.logits(neutral.run(batch, force_gather=True))
    assert (forced[mask] - plain[mask]).abs().max() < 1e-4
