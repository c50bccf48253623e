"""The LLaVA-NeXT family: newlines, statistics of tiles, and the files of checkpoints."""

import json

import pytest
import torch

from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.load import load_family
from subtoken_train.types import Region
from tests.support.helpers import save_backbone
from tests.support.tiny.llava_next import SIZES, TOKENS, next_batch, next_family, next_records
from tests.support.tiny_parts import noises


@pytest.fixture(scope="module")
def family():
    return next_family()


@pytest.fixture
def records(tmp_path):
    return next_records(tmp_path)


def test_records_have_a_visual_row_for_every_patch_and_newline(family, records):
    batch = next_batch(family, records)
    assert batch.regions_BN.eq(Region.VISUAL).sum(-1).tolist() == [TOKENS[0], sum(TOKENS[1:]), 0]
    assert batch.image_grid_I3.tolist() == [[family.layout.tiles(size), *size] for size in SIZES]
    decoded = [family.tokenizer.decode(row[row != -100]) for row in batch.labels_BN]
    assert decoded == ["the red </s>", "red </s> blue </s>", "blue </s>"]


@torch.no_grad()
def test_newlines_are_projected_to_their_embedding_and_know_no_tile(family, records):
    batch = next_batch(family, records)
    states = family.visual_states(batch, "received")
    for tokens_TC, tiles_T, received_T, keys_Td, cls_IC, size in zip(
        states.tokens, states.tiles, states.received, states.keys, states.cls, SIZES, strict=True
    ):
        rows, columns = family.layout.crop(size)
        ends = 9 + torch.arange(1, rows + 1) * (columns + 1) - 1
        assert torch.equal((tiles_T == -1).nonzero()[:, 0], ends)
        assert torch.equal(family.project(tokens_TC)[ends], family.model.model.image_newline.expand(rows, -1))
        assert not received_T[ends].any()
        assert not keys_Td[ends].any()
        assert received_T[tiles_T >= 0].gt(0).all()
        assert tiles_T.max() + 1 == len(cls_IC) == family.layout.tiles(size)


@torch.no_grad()
def test_a_patchs_attention_is_that_of_its_own_tiles_class_token(family, records):
    batch = next_batch(family, records[:1])
    states, tower = family.visual_states(batch, "received"), family.model.model.vision_tower
    tower.set_attn_implementation("eager")
    seen = tower(batch.pixel_values, output_hidden_states=True, output_attentions=True)
    tower.set_attn_implementation("sdpa")
    layer = len(seen.hidden_states) - 3
    received_IP = seen.attentions[layer][:, :, 0, 1:].sum(1)
    tiles_T = states.tiles[0]
    torch.testing.assert_close(states.received[0][:9], received_IP[0])
    for tile in range(1, 5):
        own = states.received[0][tiles_T == tile]
        assert all(torch.isclose(value, received_IP[tile], rtol=1e-4).any() for value in own)
    torch.testing.assert_close(states.cls[0][:, :-1], seen.hidden_states[layer + 1][:, 0])


def test_the_files_of_a_published_checkpoint_are_read_without_torchvision(tmp_path):
    """Their ``preprocessor_config.json`` names the class that needs torchvision, and no patch size."""
    family, folder = next_family(), save_backbone(next_family(), tmp_path / "next")
    own = json.loads((folder / "processor_config.json").read_text())["image_processor"]
    (folder / "processor_config.json").unlink()
    (folder / "preprocessor_config.json").write_text(json.dumps(own | {"processor_class": "LlavaNextProcessor"}))
    read, images = load_family(BackboneConfig(str(folder))), noises(SIZES)
    assert torch.equal(read.process_images(images)[0], family.process_images(images)[0])


@pytest.mark.parametrize("kind", ["llava", "llava_mistral"])
def test_a_checkpoint_of_llavas_own_code_is_refused_before_its_weights(tmp_path, kind):
    content = {"model_type": kind, "mm_vision_tower": "openai/clip-vit-large-patch14-336", "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(
        ValueError, match=rf"it is in the format of LLaVA's original code \('{kind}', mm_vision_tower\), not of tr"
    ):
        load_family(BackboneConfig(str(tmp_path)))
