"""FasterVLM: the class token's favourites, in order and unmerged; what the language model sees of them; refusals."""

import pytest
import torch
from transformers.models.clip.modeling_clip import CLIPEncoderLayer

from subtoken_train.cli.main import main
from subtoken_train.families import load
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.inference.pool import load_backbone
from subtoken_train.reducers import build_reducer
from subtoken_train.types import VisualStates
from tests.support.helpers import compress, make_batch, random_scores, unread
from tests.support.tiny.qwen import qwen_family

MIXED = [(1, 9), (2, 7), (0, 12)]


def kept_by_the_paper(attentions_HNN: torch.Tensor, count: int) -> list[int]:
    """Section 3.3 read plainly: the class token's row, the mean over heads, the best patches, in order."""
    row = [float(value) for value in attentions_HNN.mean(0)[0].detach()][1:]
    return sorted(sorted(range(len(row)), key=lambda place: (-row[place], place))[:count])


@pytest.mark.parametrize(("ratio", "kept"), [(0.25, 16), (0.15625, 10), (0.001, 1)])
def test_the_best_patches_of_the_eager_tower_stay_in_order(tiny_family, ratio, kept):
    batch = make_batch([(2, 5)])
    states = tiny_family.visual_states(batch, "class")
    merged = build_reducer("fastervlm", ratio).merge(states, unread(states))
    tower = tiny_family.model.model.vision_tower
    tower.set_attn_implementation("eager")
    outputs = tower(batch.pixel_values, output_hidden_states=True, output_attentions=True)
    layer = tiny_family.model.config.vision_feature_layer  # -2: what it made, and the attention of the layer that did
    for image in range(2):
        places = kept_by_the_paper(outputs.attentions[layer][image], kept)
        assert merged.slots[image].nonzero()[:, 0].tolist() == places
        assert torch.equal(merged.tokens[image], states.tokens[image][places])
        torch.testing.assert_close(states.tokens[image], outputs.hidden_states[layer][image, 1:])


def test_bf16_states_are_ranked_in_fp32():
    received = 1 + random_scores(0, 1, 64)[0] * 1e-4
    states = VisualStates([torch.zeros(64, 4, dtype=torch.bfloat16)], None, [received])
    kept = build_reducer("fastervlm", 0.25).merge(states, unread(states))
    assert kept.tokens[0].dtype == torch.bfloat16
    assert received[kept.slots[0]].min() > received[~kept.slots[0]].max()


@torch.no_grad()
def test_the_language_model_sees_what_plain_transformers_would(tiny_family):
    batch = make_batch([(1, 9)])
    backbone = compress(tiny_family, name="fastervlm", keep_ratio=0.25)
    states = tiny_family.visual_states(batch, "class")
    places = states.received[0].topk(16).indices.sort().values
    words = tiny_family.model.get_input_embeddings()(batch.input_ids_BN)
    shown = tiny_family.project(states.tokens[0][places])[None]
    embeds = torch.cat([words[:, :2], shown, words[:, 66:]], dim=1)
    expected = tiny_family.model.lm_head(tiny_family.decoder(inputs_embeds=embeds).last_hidden_state)
    torch.testing.assert_close(backbone.logits(backbone.run(batch)), expected, rtol=1e-5, atol=1e-5)
    assert backbone.run(batch).rows.index_BM[0, 2:18].tolist() == (2 + places).tolist()
    assert not backbone.placeless


def test_the_tower_keeps_its_fast_attention_and_one_layer_is_computed_again(tiny_family, monkeypatch):
    calls = []
    forward = CLIPEncoderLayer.forward
    monkeypatch.setattr(CLIPEncoderLayer, "forward", lambda self, *a, **k: calls.append(self) or forward(self, *a, **k))
    tiny_family.visual_states(make_batch([(1, 5)]), "class")
    assert len(calls) == tiny_family.model.config.vision_config.num_hidden_layers
    assert tiny_family.model.model.vision_tower.config._attn_implementation == "sdpa"


REFUSED = "reducer 'fastervlm' ranks by a class token's attention, which the vision tower of qwen2_5_vl does not give"


def test_a_tower_without_a_class_token_is_refused_before_weights_are_read(tmp_path, monkeypatch):
    qwen_family().model.config.save_pretrained(tmp_path)
    monkeypatch.setattr(load, "load_weights", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(ValueError, match=REFUSED + "; use visionzip or fastv"):
        load_backbone(tmp_path, backbone=BackboneConfig(), reducer=build_reducer("fastervlm", 0.5))


@pytest.mark.slow
def test_check_names_what_fits_instead(capsys):
    argv = ["check", "--config", "qwenvl3b_visionzip25_s16k4", "--offline", "--model.reducer.name", "fastervlm"]
    assert main(argv) != 0
    assert REFUSED in capsys.readouterr().err


def test_a_class_token_that_is_a_visual_token_ranks_nothing(tiny_family):
    tiny_family.model.config.vision_feature_select_strategy = "full"
    with pytest.raises(ValueError, match=r"'visionzip' ranks by the attention .* llava does not give; use fastv"):
        compress(tiny_family, name="visionzip", keep_ratio=0.5)
