"""``ranking: frozen``: all adapters of a backbone keep the tokens that it ranks best, in training and after."""

import json
from dataclasses import replace

import pytest
import torch

from subtoken_train.artifact.config import read_config
from subtoken_train.artifact.folder import check_mergeable, read_adapter
from subtoken_train.engine.build import Stage2Config, assemble
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.engine.modes import without_lora
from subtoken_train.families.lora import LoraSettings
from subtoken_train.reducers import build_reducer
from subtoken_train.routing import RoutingConfig
from tests.support.helpers import make_batch, sharpen, write_vlm_adapter

PROMPTS = [(1, 9), (1, 12), (2, 7), (0, 12)]


def adapted(family, stage2=None, **reducer):
    """FastV at a quarter on a family whose every LoRA says something."""
    torch.manual_seed(0)
    routing = None if stage2 is None else RoutingConfig()
    parts, _ = assemble(family, LoraSettings(rank=4, alpha=8, dropout=0.3), reducer_of(**reducer), routing, stage2)
    with torch.no_grad():
        for name, parameter in family.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.4)
    return parts


def reducer_of(**settings):
    return build_reducer("fastv", 0.25, **settings)


def kept(parts, batch):
    rows = parts.run(batch).rows
    return [index[seen].tolist() for index, seen in zip(rows.index_BM, rows.visible_BM, strict=True)]


@pytest.mark.parametrize("pad_left", [False, True])
@pytest.mark.parametrize("layer", [2, 4])
def test_the_backbone_alone_ranks(tiny_family, pad_left, layer):
    sharpen(tiny_family)
    batch = make_batch(PROMPTS, pad_left)
    plain = kept(CompressedBackbone(tiny_family, reducer_of(layer=layer)), batch)
    frozen = adapted(tiny_family, layer=layer, ranking="frozen")
    assert kept(frozen, batch) == plain
    drifted = CompressedBackbone(tiny_family, replace(frozen.reducer, ranking="adapted"))
    assert kept(drifted, batch) != plain


def test_in_training_the_lora_still_learns(tiny_family):
    """Dropout and LoRA are off in the scout alone: the kept rows are the backbone's, and their gradient is there."""
    batch = make_batch(PROMPTS)
    plain = kept(CompressedBackbone(tiny_family, reducer_of()), batch)
    parts = adapted(tiny_family, ranking="frozen")
    parts.train()
    assert kept(parts, batch) == plain
    parts.logits(parts.run(batch)).float().pow(2).mean().backward()
    missing = [name for name, x in parts.named_parameters() if x.requires_grad and x.grad is None]
    assert missing == []


def test_stage_2_ranks_without_either_lora(tiny_family):
    batch = make_batch(PROMPTS)
    plain = kept(CompressedBackbone(tiny_family, reducer_of()), batch)
    second = Stage2Config("nowhere", LoraSettings(rank=2, alpha=4, dropout=0.0))
    parts = adapted(tiny_family, second, ranking="frozen")
    before = {name: x.requires_grad for name, x in parts.named_parameters()}
    assert kept(parts, batch) == plain
    assert {name: x.requires_grad for name, x in parts.named_parameters()} == before
    assert sum("lora_" in name and not trained for name, trained in before.items()) > 0  # stage 1's stay frozen


def test_lora_is_left_out_of_a_block_and_is_back_after_an_error(tiny_family):
    parts = adapted(tiny_family)
    projection = tiny_family.decoder.layers[1].self_attn.q_proj
    inputs = torch.randn(2, 3, 128)
    parts.eval()
    with torch.no_grad():
        with_lora = projection(inputs)
        with without_lora(tiny_family.decoder):
            with without_lora(tiny_family.decoder):  # the inner one leaves what it found
                pass
            assert torch.equal(projection(inputs), projection.base_layer(inputs))
        assert torch.equal(projection(inputs), with_lora)
        with pytest.raises(ValueError, match="shape"), without_lora(tiny_family.decoder):
            raise ValueError("shape")
        assert torch.equal(projection(inputs), with_lora)
        assert not torch.equal(with_lora, projection.base_layer(inputs))


def test_an_adapter_folder_remembers_it(tmp_path):
    folder = write_vlm_adapter(tmp_path / "adapter")
    path = folder / "subtoken_config.json"
    record = json.loads(path.read_text())
    assert record["reducer"]["ranking"] == "adapted"
    del record["reducer"]["ranking"]  # as folders of schema 4 were
    path.write_text(json.dumps({**record, "schema_version": 4}))
    assert read_config(folder).reducer.ranking == "adapted"
    record["reducer"]["ranking"] = "frozen"
    path.write_text(json.dumps(record))
    _, parts, _ = read_adapter(folder)
    assert parts.reducer.frozen_scout
    with pytest.raises(ValueError, match=r"cannot merge .*ranking: frozen.*without --merge-lora"):
        check_mergeable(parts)
    path.write_text(json.dumps({**record, "merged": True}))
    with pytest.raises(ValueError, match="merged, with a frozen ranking"):
        read_config(folder)
