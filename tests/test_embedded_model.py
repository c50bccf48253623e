"""The embedded VLM is what its README says, and everything else holds on it, too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from subtoken_train.artifact.folder import read_adapter
from subtoken_train.datasets.collate import Collator
from subtoken_train.datasets.records import InstructionRecords
from subtoken_train.datasets.scene_files import write_scene_split
from subtoken_train.datasets.scenes import DESCRIPTION_KINDS
from subtoken_train.evaluation.runner.data_file import answer_records
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.load import load_family
from subtoken_train.routing import RoutingConfig
from subtoken_train.types import Region
from tests.support.helpers import compress
from tests.support.sampling import sampled

CHECKPOINTS = Path(__file__).resolve().parents[1] / "checkpoints"


@pytest.fixture(scope="module")
def dev(tmp_path_factory):
    """Held-out scenes (digits of the dev split): 36 of each short kind."""
    folder = tmp_path_factory.mktemp("scenes")
    write_scene_split(folder, "dev", 280, seed=11)
    return InstructionRecords(folder / "dev.json")


@pytest.fixture(scope="module")
def family():
    return load_family(BackboneConfig())


def short_scores(answers):
    return np.array([record.score for record in answers.records if record.kind not in DESCRIPTION_KINDS])


def test_size():
    assert (CHECKPOINTS / "tiny-llava" / "model.safetensors").stat().st_size <= 12e6


def test_answers_held_out_scenes(family, dev):
    by_kind = answer_records(compress(family).eval(), dev).by_kind()
    for kind, scores in by_kind.items():
        assert np.mean(scores) >= (0.80 if kind == "count" else 0.88), kind  # of 36 questions: a floor


@torch.no_grad()
def test_neutral_settings(family, dev):
    batch = Collator(family, 512)([dev[i] for i in range(6)])
    mask = batch.regions_BN != Region.PADDING
    plain = family.model(
        input_ids=batch.input_ids_BN, pixel_values=batch.pixel_values, attention_mask=mask.long(), use_cache=False
    ).logits
    routing = RoutingConfig(num_groups=16, kept_groups=16)
    neutral = compress(family, routing, name="fastv", keep_ratio=1.0).eval()
    assert torch.equal(neutral.logits(neutral.run(batch))[mask], plain[mask])
    forced = neutral.logits(neutral.run(batch, force_gather=True))
    assert (forced[mask] - plain[mask]).abs().max() < 1e-5


@pytest.mark.slow
def test_random_routers_lower_the_accuracy_of_a_trained_adapter(dev):
    _, backbone, _ = read_adapter(CHECKPOINTS / "adapters" / "tiny_fastv25_s16k4")
    trained = short_scores(answer_records(backbone, dev))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in backbone.bank.parameters():
            parameter.normal_(std=0.02)
    untrained = short_scores(answer_records(backbone, dev))
    assert trained.mean() - untrained.mean() > 0.02


@sampled("name", ["tiny_fastv25_s16k4", "tiny_fastv25_s16k4_anchor", "tiny_lora_only"], every=3)
def test_shipped_adapters_load(name):
    config, _, _ = read_adapter(CHECKPOINTS / "adapters" / name)
    assert config.training["name"].startswith(name)
