"""The LLaVA-NeXT family: chat formats, tiles, newlines, transformers' own inputs, logits and answers."""

import json

import pytest
import torch
from PIL import Image

from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.decoder import layer_windows
from subtoken_train.families.images import Video
from subtoken_train.families.llava_next import LlavaNextFamily
from subtoken_train.families.load import layout_family, load_family
from subtoken_train.inference.prompt_inputs import batch_from_inputs, inputs_of
from subtoken_train.types import Region, Turn
from tests.support.helpers import compress, save_backbone
from tests.support.own_forward import check_answers, check_logits
from tests.support.tiny.llava_next import SIDE, SIZES, TOKENS, next_batch, next_family, next_images, next_records

PROMPTS = [
    "<s>[INST] <image>\nwhat is left ? [/INST]",
    "<s>[INST] <image>\n<image>\nwhich one ? [/INST] red</s> [INST] <image>\nand now ? [/INST]",
    "<s>[INST] who are you ? [/INST]",
]


@pytest.fixture(scope="module")
def family():
    return next_family()


@pytest.fixture(scope="module")
def images():
    return next_images()


@pytest.fixture
def records(tmp_path):
    return next_records(tmp_path)


def processed(family, images, side):
    """Three prompts of one, three and no images as transformers' processor makes them."""
    return family.processor(text=PROMPTS, images=images, padding=True, padding_side=side, return_tensors="pt")


def batch_of(family, given):
    return batch_from_inputs(family, given["input_ids"], given["attention_mask"].bool(), given, None)


def test_mistrals_format_is_the_published_template(family):
    turns = [Turn("<image>\nwhat is left ?", " red "), Turn("and <image> now ?", "blue"), Turn("last")]
    rendered = family.render(turns)
    assert rendered.text == (
        "<s>[INST] <image>\nwhat is left ? [/INST] red</s> [INST] <image>\nand  now ? [/INST] blue</s> "
        "[INST] last [/INST]"
    )
    assert [rendered.text[start:stop] for start, stop in rendered.answer_spans] == [" red</s>", " blue</s>"]
    messages = []
    for images, asked, answer in ((1, "what is left ?", "red"), (1, "and  now ?", "blue"), (0, "last", None)):
        content = [{"type": "image"}] * images + [{"type": "text", "text": asked}]
        messages.append({"role": "user", "content": content})
        if answer is not None:
            messages.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
    assert rendered.text == family.processor.apply_chat_template(messages, tokenize=False)


def test_yis_format_is_the_published_template():
    family = layout_family(BackboneConfig("llava-hf/llava-v1.6-34b-hf", dtype="bfloat16"))
    assert (family.shape.num_layers, family.shape.num_kv_heads, family.shape.head_dim) == (60, 8, 128)
    turns = [Turn("<image>\nwhat is left?", " red "), Turn("and now?")]
    rendered = family.chat.render(turns, "<image>", "<s>", "</s>")
    assert rendered.text == (
        "<|im_start|>system\nAnswer the questions.<|im_end|><|im_start|>user\n<image>\nwhat is left?<|im_end|>"
        "<|im_start|>assistant\nred<|im_end|><|im_start|>user\nand now?<|im_end|><|im_start|>assistant\n"
    )
    assert [rendered.text[start:stop] for start, stop in rendered.answer_spans] == ["red<|im_end|>"]


def test_vicunas_format_has_the_published_system_text():
    family = next_family("llama")
    assert family.render([Turn("<image>\nWhat is shown in this image?")]).text == (
        "<s>A chat between a curious human and an artificial intelligence assistant. The assistant gives helpful, "
        "detailed, and polite answers to the human's questions. USER: <image>\nWhat is shown in this image? ASSISTANT:"
    )
    rendered = family.render([Turn("what ?", "red"), Turn("<image> and now ?", "blue")])
    assert rendered.text == (
        f"<s>{family.chat.system_text}USER: what ? ASSISTANT: red</s>USER: <image>\nand now ? ASSISTANT: blue</s>"
    )
    assert [rendered.text[start:stop] for start, stop in rendered.answer_spans] == [" red</s>", " blue</s>"]


def test_records_have_a_visual_row_for_every_patch_and_newline(family, records):
    batch = next_batch(family, records)
    assert batch.regions_BN.eq(Region.VISUAL).sum(-1).tolist() == [TOKENS[0], sum(TOKENS[1:]), 0]
    assert batch.image_grid_I3.tolist() == [[family.layout.tiles(size), *size] for size in SIZES]
    decoded = [family.tokenizer.decode(row[row != -100]) for row in batch.labels_BN]
    assert decoded == ["the red </s>", "red </s> blue </s>", "blue </s>"]


@pytest.mark.parametrize("side", ["left", "right"])
def test_prompts_and_pixels_are_what_transformers_processor_makes(family, images, side):
    given = processed(family, images, side)
    assert (given["input_ids"] == family.image_token_id).sum(-1).tolist() == [TOKENS[0], sum(TOKENS[1:]), 0]
    pixels, layouts = family.process_images(images)
    assert torch.equal(layouts[:, 1:], given["image_sizes"])
    own = [tiles[: int(count)] for tiles, count in zip(given["pixel_values"], layouts[:, 0], strict=True)]
    assert torch.equal(pixels, torch.cat(own))
    ours = inputs_of(family, "what is left ?", images[:1])
    alone = family.processor(text=PROMPTS[:1], images=images[:1], return_tensors="pt", add_special_tokens=False)
    assert torch.equal(ours["input_ids"], alone["input_ids"])


def test_tiles_are_read_padded_and_one_after_another(family, images):
    given = processed(family, images, "left")
    padded = batch_of(family, given)
    joined = given | family.given_images(padded.pixel_values, padded.image_grid_I3, given["input_ids"])
    assert joined["pixel_values"].dim() == 4
    again = batch_of(family, joined)
    assert torch.equal(padded.pixel_values, again.pixel_values)
    assert torch.equal(padded.image_grid_I3, again.image_grid_I3)
    assert padded.images_per_sample_B.tolist() == again.images_per_sample_B.tolist() == [1, 3, 0]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_logits_are_transformers_own(images, kind, side):
    family = next_family(kind)
    given = processed(family, images, side)
    check_logits(family, given, batch_of(family, given), side)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_answers_are_transformers_own(images, kind):
    family = next_family(kind)
    check_answers(family, processed(family, images, "left"), pad_token_id=0)


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


@pytest.mark.parametrize(("name", "system"), [("vicuna-7b", 35), ("mistral-7b", 5), ("34b", 11)])
def test_nominal_prompts_have_the_formats_system_text(name, system):
    family = layout_family(BackboneConfig(f"llava-hf/llava-v1.6-{name}-hf"))
    assert family.nominal_text == {**family.paper_text, "system": system}


@pytest.mark.parametrize(
    ("name", "heads", "layers"),
    [("vicuna-7b", (32, 128), 32), ("vicuna-13b", (40, 128), 40), ("mistral-7b", (8, 128), 32)],
)
def test_published_models(name, heads, layers):
    family = layout_family(BackboneConfig(f"llava-hf/llava-v1.6-{name}-hf", dtype="bfloat16"))
    shape = family.shape
    assert ((shape.num_kv_heads, shape.head_dim), shape.num_layers) == (heads, layers)
    assert family.visual_tokens() == family.visual_tokens((672, 672)) == 2880 + 48
    assert family.image_bytes() == 5 * 3 * 336 * 336 * 4
    weights = sum(parameter.numel() for parameter in family.model.parameters())
    assert weights == {"vicuna-7b": 7063431168, "vicuna-13b": 13351499776, "mistral-7b": 7566747648}[name]


def test_what_it_does_not_take_is_refused_in_words(family, images):
    with pytest.raises(ValueError, match="vision_feature_select_strategy 'full' of llava_next is not supported"):
        next_family(vision_feature_select_strategy="full")
    with pytest.raises(ValueError, match="llava_next takes images and no videos"):
        family.picture_text(Video(tuple(images[:1])), "<image>")
    with pytest.raises(ValueError, match="max_pixels=9: llava_next scales images to 24 x 48, 48 x 24, 48 x 48"):
        family.limit_pixels(9)
    windowed = next_family().model.config
    windowed.text_config.sliding_window = 16
    assert set(layer_windows(windowed)) == {16}
    with pytest.raises(ValueError, match="reducer 'quest' evicts the context of a language model"):
        compress(family, name="quest", keep_ratio=0.5)


def test_tiles_that_the_model_does_not_know_are_refused(family, images):
    given = processed(family, images, "left")
    taken = r"this llava_next takes 18 of \(3, 24, 24\) for images of \[\(30, 50\), \(61, 17\)"
    with pytest.raises(ValueError, match=rf"18 tiles of \(3, 24, 12\) but {taken}"):
        batch_of(family, given | {"pixel_values": given["pixel_values"][..., :12]})
    with pytest.raises(ValueError, match=rf"16 tiles of \(3, {SIDE}, {SIDE}\) but {taken}"):
        batch_of(family, given | {"pixel_values": given["pixel_values"][:, :4]})
    with pytest.raises(ValueError, match="pixel_values of 3 images but image_sizes of 4"):
        batch_of(family, given | {"pixel_values": given["pixel_values"][:3]})
    for lacking in ({"image_sizes": None}, {"pixel_values": given["pixel_values"][0, 0]}):
        with pytest.raises(ValueError, match=r"with image_sizes \[images, 2\]; pass the processor's whole output"):
            batch_of(family, given | lacking)
    swapped = given | {"image_sizes": given["image_sizes"].flip(0), "pixel_values": given["pixel_values"].flip(0)}
    with pytest.raises(ValueError, match=r"pictures of .* visual tokens but prompts of"):
        batch_of(family, swapped)


def test_an_image_processor_of_another_checkpoint_is_refused(images):
    family = next_family()
    family.processor.image_processor.image_grid_pinpoints = [[48, 24]]
    with pytest.raises(ValueError, match="use the processor of the same checkpoint"):
        family.process_images(images)
    assert isinstance(family, LlavaNextFamily)
    assert family.process_images([Image.new("RGB", (11, 40))])[1].tolist() == [[3, 40, 11]]


def test_the_files_of_a_published_checkpoint_are_read_without_torchvision(tmp_path, images):
    """Their ``preprocessor_config.json`` names the class that needs torchvision, and no patch size."""
    family, folder = next_family(), save_backbone(next_family(), tmp_path / "next")
    own = json.loads((folder / "processor_config.json").read_text())["image_processor"]
    (folder / "processor_config.json").unlink()
    (folder / "preprocessor_config.json").write_text(json.dumps(own | {"processor_class": "LlavaNextProcessor"}))
    read = load_family(BackboneConfig(str(folder)))
    assert torch.equal(read.process_images(images)[0], family.process_images(images)[0])


@pytest.mark.parametrize("kind", ["llava", "llava_mistral"])
def test_a_checkpoint_of_llavas_own_code_is_refused_before_its_weights(tmp_path, kind):
    content = {"model_type": kind, "mm_vision_tower": "openai/clip-vit-large-patch14-336", "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(
        ValueError, match=rf"it is in the format of LLaVA's original code \('{kind}', mm_vision_tower\), not of tr"
    ):
        load_family(BackboneConfig(str(tmp_path)))
