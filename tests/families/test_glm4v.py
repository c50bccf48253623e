"""GLM-4.1V and GLM-4.5V: chat format, marks of pictures, sizes, padded batches, published shapes."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import BatchFeature
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor

from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.load import layout_family
from subtoken_train.inference.prompt_inputs import batch_from_inputs
from subtoken_train.types import Region, Turn
from tests.support.helpers import compress
from tests.support.own_forward import check_answers
from tests.support.sampling import sampled
from tests.support.tiny.glm4v import glm_family
from tests.support.tiny.qwen import SIZES, TOKENS, made_as_counted, qwen_records, qwen_video
from tests.support.tiny_parts import noises, padded
from tests.support.truth_cells import CELL, difference

FAMILY = glm_family()
PROMPTS = [
    "[gMASK]<sop><|user|>\n<|image|>where is it?<|assistant|>\n",
    "[gMASK]<sop><|user|>\n<|image|>and<|image|>now?<|assistant|>\n",
    "[gMASK]<sop><|user|>\nwho are you?<|assistant|>\n",
]


@pytest.fixture(params=[False, True], ids=["glm4v", "glm4v_moe"])
def family(request):
    return glm_family(experts=request.param)


def their_inputs(family, images, side):
    """As ``Glm4vProcessor`` makes them, which needs torchvision: by its own methods for images and kinds of tokens."""
    theirs, texts = object.__new__(Glm4vProcessor), [*PROMPTS]
    theirs.image_processor, theirs.image_token = family.processor.image_processor, "<|image|>"
    of = family.tokenizer.convert_tokens_to_ids
    theirs.image_token_id = of("<|image|>")
    theirs.video_start_id, theirs.video_end_id = of("<|begin_of_video|>"), of("<|end_of_video|>")
    shown = theirs.image_processor(images, return_tensors="pt")
    number = 0
    for row, text in enumerate(texts):
        parts = text.split("<|image|>")
        for part in range(1, len(parts)):
            run = theirs.replace_image_token(shown, number)
            parts[part] = f"<|begin_of_image|>{run}<|end_of_image|>{parts[part]}"
            number += 1
        texts[row] = "".join(parts)
    family.tokenizer.padding_side = side
    ids = family.tokenizer(texts, padding=True, return_tensors="pt", add_special_tokens=False)
    kinds = torch.tensor(theirs.create_mm_token_type_ids(ids["input_ids"].tolist()))
    made = {"input_ids": ids["input_ids"], "attention_mask": ids["attention_mask"], "mm_token_type_ids": kinds}
    return BatchFeature({**made, **shown})


def batch_of(family, given):
    return batch_from_inputs(family, given["input_ids"], given["attention_mask"].bool(), given, None)


def test_the_format_is_the_published_template(family):
    turns = [Turn("<image>\nwhere is it?", " left "), Turn("and\n<image>\nnow?", "right"), Turn("last")]
    rendered = family.render(turns)
    off, empty = ("/nothink", "<think></think>\n") if family.name == "glm4v_moe" else ("", "")
    assert rendered.text == (
        f"[gMASK]<sop><|user|>\n<|image|>where is it?{off}<|assistant|>\n{empty}left<|user|>\n"
        f"and<|image|>now?{off}<|assistant|>\n{empty}right<|user|>\nlast{off}<|assistant|>\n{empty}"
    )
    assert [rendered.text[start:stop] for start, stop in rendered.answer_spans] == ["left<|user|>", "right<|user|>"]


def test_labels_are_answers_and_marks_are_text(family, tmp_path):
    batch = padded(family, qwen_records(tmp_path))
    decoded = [family.tokenizer.decode(row[row != -100]) for row in batch.labels_BN]
    assert decoded == ["there it is<|user|>", "left<|user|>on the right<|user|>", "a helpful assistant<|user|>"]
    assert batch.regions_BN.eq(Region.VISUAL).sum(-1).tolist() == [TOKENS[0], TOKENS[1] + TOKENS[2], 0]
    visual = family.is_visual(batch.input_ids_BN[0]).nonzero()[:, 0]
    around = batch.input_ids_BN[0, [int(visual[0]) - 1, int(visual[-1]) + 1]]
    assert family.tokenizer.decode(around) == "<|begin_of_image|><|end_of_image|>"


def test_times_are_whole_seconds_behind_their_layers():
    text = FAMILY.picture_text(qwen_video(5, fps=1.25), "<|image|>").replace("<|image|>", "")
    run = "<|begin_of_image|><|end_of_image|>"
    assert text == f"<|begin_of_video|>{run}0{run}1{run}3<|end_of_video|>"


@given(height=st.integers(1, 400), width=st.integers(1, 400), cap=st.sampled_from([3136, 20_000, 112_896, 1_003_520]))
@example(height=1, width=2, cap=3136)
def test_counted_tokens_are_what_the_processor_makes(height, width, cap):
    _, grid = made_as_counted(FAMILY, height, width, cap)
    most = max(cap, 28 * max(height, width) * 28 / min(height, width))
    if round(height / 28) * round(width / 28) * 28**2 < FAMILY.min_pixels:  # scaled up, perhaps past the cap
        most = max(most, 4 * FAMILY.min_pixels)
    assert grid.prod() * 14**2 <= most


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_gives_transformers_logits(family, side):
    """Bit for bit with nothing reduced; to 1e-5 where a reducer gathers all rows."""
    given = their_inputs(family, noises(SIZES), side)
    batch, seen = batch_of(family, given), given["attention_mask"].bool()
    assert batch.regions_BN.eq(Region.VISUAL).sum(-1).tolist() == [TOKENS[0], TOKENS[1] + TOKENS[2], 0]
    assert torch.equal(family.kinds(given["input_ids"]), given["mm_token_type_ids"])
    expected = family.model(**given).logits[seen]
    backbone = compress(family)
    assert torch.equal(backbone.logits(backbone.run(batch))[seen], expected)
    forced = compress(family, name="fastv", keep_ratio=1.0)
    got = forced.logits(forced.run(batch, pad_left=side == "left", force_gather=True))[seen]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_answers_are_transformers_own(family):
    check_answers(family, their_inputs(family, noises(SIZES), "left"), min_new_tokens=8)


ROUTED = {**CELL, "scope": "context", "batch": "three_left", "protocol": "query_aware"}
CELLS = {
    "cut": {"reducer": "fastv_decoder", "eviction": "snapkv"},
    "shortened": {"reducer": "fastv_embeds", "eviction": "none", "batch": "last_right"},
    "merged": {"reducer": "visionzip", "eviction": "own_sets", "batch": "text_right"},
    "dropped": {"reducer": "sparsevlm", "selector": "none", "eviction": "kvzip"},
}


@sampled("cell", CELLS, every=3)
@pytest.mark.parametrize("family", ["qwen3_vl_moe", "glm4v_moe"])
def test_experts_between_packed_layers_are_those_of_a_full_recompute(family, cell):
    """In fp32: rounded states can choose other experts."""
    found = difference(ROUTED | CELLS[cell] | {"family": family}, 8)
    assert found.fits("fp32"), found


@pytest.mark.parametrize(
    ("name", "shape", "parameters"),
    [
        ("zai-org/GLM-4.1V-9B-Thinking", (40, 2, 128), 10_292_777_472),
        # without the 45 x 128 biases of its experts' choice, which are buffers
        ("zai-org/GLM-4.5V", (46, 8, 128), 107_710_933_120 - 45 * 128),
    ],
)
def test_published_models(name, shape, parameters):
    family = layout_family(BackboneConfig(name, dtype="bfloat16"))
    assert (family.shape.num_layers, family.shape.num_kv_heads, family.shape.head_dim) == shape
    assert sum(parameter.numel() for parameter in family.model.parameters()) == parameters
    assert family.visual_tokens() == 144
    assert (family.min_pixels, family.visual_tokens((4000, 4000))) == (6272, 35 * 35)
