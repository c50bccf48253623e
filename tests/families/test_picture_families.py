"""Families that see images, beside the processors and models of transformers that they wrap, by tables."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch
from transformers import BatchFeature
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor

from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.family import Family
from subtoken_train.families.images import Video
from subtoken_train.families.load import layout_family
from subtoken_train.inference.prompt_inputs import batch_from_inputs, inputs_of
from subtoken_train.types import Region, Turn
from tests.support.helpers import check_logits, compress
from tests.support.refusals import refuses, refusing
from tests.support.tiny import idefics3, internvl, mistral3, noises, padded, qwen, three_records
from tests.support.tiny import llava as llava_next
from tests.support.tiny.qwen import glm_family

QUESTION = "what is left ?"


def talks(family: Family, images: int) -> list[str]:
    """Prompts of one, all others and no images; that they are the published template is test_chat_formats' to say."""
    several = [Turn("<image>\n" * (images - 2) + "which one ?", "red"), Turn("<image>\nand now ?")]
    return [family.render(turns).text for turns in ([Turn(f"<image>\n{QUESTION}")], several, [Turn("who are you ?")])]


def by_processor(processor: Callable[[Family], Any], nested: bool = False) -> Callable[..., Any]:
    """The prompts as a processor of transformers makes them."""

    def made(family, images, side, alone=False):
        texts, shown = talks(family, len(images))[: 1 if alone else 3], images[:1] if alone else images
        if nested and not alone:
            shown = [images[:1], images[1:], []]
        settings = {} if alone else {"padding": True, "padding_side": side}
        return processor(family)(text=texts, images=shown, return_tensors="pt", **settings)

    return made


def glm_inputs(family, images, side, alone=False):
    """As ``Glm4vProcessor`` makes them, which needs torchvision: by its own methods for images and kinds of tokens."""
    theirs, texts = object.__new__(Glm4vProcessor), talks(family, len(images))[: 1 if alone else 3]
    theirs.image_processor, theirs.image_token = family.processor.image_processor, "<|image|>"
    of = family.tokenizer.convert_tokens_to_ids
    theirs.image_token_id = of("<|image|>")
    theirs.video_start_id, theirs.video_end_id = of("<|begin_of_video|>"), of("<|end_of_video|>")
    shown = theirs.image_processor(images[:1] if alone else images, return_tensors="pt")
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


def mistral_inputs(family, images, side, alone=False):
    texts = talks(family, len(images))[: 1 if alone else 3]
    return mistral3.their_inputs(family, texts, images[:1] if alone else images, side)


of_next = by_processor(lambda family: family.processor)
of_internvl = by_processor(lambda _: internvl.transformers_processor())
of_idefics = by_processor(lambda _: idefics3.transformers_processor(), nested=True)


class Case(NamedTuple):
    """A family: how it is built, the inputs of transformers' processor, its images and their visual tokens."""

    build: Callable[..., Family]
    inputs: Callable[..., Any]
    sizes: tuple[tuple[int, int], ...]
    tokens: list[int]
    answers: tuple[str, str] = ("", "")  # what is learnt before and behind an answer's words


TILES = [4 * count for count in internvl.TILES]
PLACES = [4 * (rows * columns + 1) for rows, columns in idefics3.GRIDS]
CELLS = [rows * columns for rows, columns in mistral3.GRIDS]
CASES = {
    "llava_next mistral": Case(llava_next.next_family, of_next, llava_next.SIZES, [*llava_next.TOKENS]),
    "llava_next llama": Case(partial(llava_next.next_family, "llama"), of_next, llava_next.SIZES, [*llava_next.TOKENS]),
    **{
        f"internvl {text}": Case(
            partial(internvl.internvl_family, text_type=text), of_internvl, internvl.SIZES, TILES, ("", "<|im_end|>")
        )
        for text in ("qwen2", "qwen3")
    },
    **{
        kind: Case(
            partial(idefics3.idefics_family, kind), of_idefics, idefics3.SIZES, PLACES, (" ", "<end_of_utterance>")
        )
        for kind in idefics3.KINDS
    },
    **{
        kind: Case(partial(mistral3.mistral3_family, kind), mistral_inputs, mistral3.SIZES, CELLS, ("", "</s>"))
        for kind in ("mistral", "ministral3")
    },
    **{
        name: Case(partial(glm_family, experts=experts), glm_inputs, qwen.SIZES, [*qwen.TOKENS], ("", "<|user|>"))
        for name, experts in (("glm4v", False), ("glm4v_moe", True))
    },
}
THREE = [name for name in CASES if not name.startswith(("glm", "llava_next"))]


@cache
def built(name: str) -> Family:
    return CASES[name].build()


def batch_of(family, given):
    return batch_from_inputs(family, given["input_ids"], given["attention_mask"].bool(), given, None)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", CASES)
def test_inputs_and_logits_are_transformers_own(name, side):
    """Prompts and pixels of the real processor are read and written, and give the model's logits bit for bit."""
    family, case = built(name), CASES[name]
    images = noises(case.sizes)
    given = case.inputs(family, images, side)
    batch, own = batch_of(family, given), family.process_images(images)
    assert (batch.regions_BN == Region.VISUAL).sum(-1).tolist() == [case.tokens[0], sum(case.tokens[1:]), 0]
    assert batch.images_per_sample_B.tolist()[2] == 0
    assert torch.equal(batch.pixel_values, own[0])
    if own[1] is not None:
        assert torch.equal(batch.image_grid_I3, own[1])
    back = family.given_images(batch.pixel_values, batch.image_grid_I3, batch.input_ids_BN)
    again = batch_of(family, {**given, **back})
    assert torch.equal(again.pixel_values, batch.pixel_values)
    assert again.images_per_sample_B.tolist() == batch.images_per_sample_B.tolist()
    if "mm_token_type_ids" in given:
        assert torch.equal(family.kinds(given["input_ids"]), given["mm_token_type_ids"])
    check_logits(family, given, batch, side)


@pytest.mark.parametrize("name", [*THREE, "llava_next mistral"])
def test_a_prompt_is_what_transformers_processor_makes(name):
    family, case = built(name), CASES[name]
    images = noises(case.sizes)
    ours = inputs_of(family, QUESTION, images[:1])
    alone = case.inputs(family, images, "left", alone=True)
    # llava_next's tokenizer begins each text with <s>, and its processor has an axis of images
    assert torch.equal(ours["input_ids"], alone["input_ids"][:, -ours["input_ids"].shape[1] :])
    assert torch.equal(ours["pixel_values"].flatten(), alone["pixel_values"].flatten())


@pytest.mark.parametrize("name", [*THREE, "glm4v", "glm4v_moe"])
def test_labels_are_answers_with_their_end_and_marks_are_text(name, tmp_path):
    family, case = built(name), CASES[name]
    before, behind = case.answers
    three = name in THREE
    batch = padded(family, three_records(tmp_path, case.sizes) if three else qwen.qwen_records(tmp_path))
    one, two, text = ("the left", ("left", "right"), "there") if three else qwen.ANSWERS
    said = [f"{before}{one}{behind}", "".join(f"{before}{each}{behind}" for each in two), f"{before}{text}{behind}"]
    assert [family.tokenizer.decode(row[row != -100]) for row in batch.labels_BN] == said
    assert batch.regions_BN.eq(Region.VISUAL).sum(-1).tolist() == [case.tokens[0], sum(case.tokens[1:]), 0]
    visual = (batch.regions_BN[0] == Region.VISUAL).nonzero()[:, 0]
    between = ~(batch.regions_BN[0, visual[0] : visual[-1] + 1] == Region.VISUAL)
    assert set(batch.regions_BN[0, visual[0] : visual[-1] + 1][between].tolist()) <= {int(Region.QUERY)}


PUBLISHED = {
    # layers, key-value heads, head width; parameters; visual tokens of the nominal image
    "llava-hf/llava-v1.6-vicuna-7b-hf": ((32, 32, 128), 7_063_431_168, 2880 + 48),
    "llava-hf/llava-v1.6-vicuna-13b-hf": ((40, 40, 128), 13_351_499_776, 2880 + 48),
    "llava-hf/llava-v1.6-mistral-7b-hf": ((32, 8, 128), 7_566_747_648, 2880 + 48),
    "llava-hf/llava-v1.6-34b-hf": ((60, 8, 128), None, 2880 + 48),
    "llava-hf/llava-onevision-qwen2-7b-ov-hf": ((28, 4, 128), None, 3645 + 54),
    "OpenGVLab/InternVL3-1B-hf": ((24, 2, 64), 938_193_024, 5 * 256),
    "OpenGVLab/InternVL3-2B-hf": ((28, 2, 128), 2_088_957_440, 5 * 256),
    "OpenGVLab/InternVL3-8B-hf": ((28, 4, 128), 7_944_373_760, 5 * 256),
    "OpenGVLab/InternVL3_5-8B-HF": ((36, 8, 128), 8_528_318_464, 5 * 256),
    "OpenGVLab/InternVL3_5-14B-HF": ((40, 8, 128), 15_119_523_840, 5 * 256),
    "HuggingFaceTB/SmolVLM-256M-Instruct": ((30, 3, 64), 256_484_928, 13 * 64),
    "HuggingFaceTB/SmolVLM2-500M-Video-Instruct": ((32, 5, 64), 507_482_304, 13 * 64),
    "HuggingFaceTB/SmolVLM2-2.2B-Instruct": ((24, 32, 64), 2_246_784_880, 13 * 81),
    "HuggingFaceM4/Idefics3-8B-Llama3": ((32, 8, 128), 8_462_086_384, 13 * 169),
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": ((40, 8, 128), 24_011_361_280, 24 * 32),
    "meta-llama/Llama-3.1-8B-Instruct": ((32, 8, 128), 8_030_261_248, None),
    "mistralai/Mistral-7B-v0.1": ((32, 8, 128), 7_241_732_096, None),
    "Qwen/Qwen3-8B": ((36, 8, 128), 8_190_735_360, None),
    "Qwen/Qwen3-14B": ((40, 8, 128), 14_768_307_200, None),
    "Qwen/Qwen2-VL-2B-Instruct": ((28, 2, 128), None, 144),
    "Qwen/Qwen2-VL-7B-Instruct": ((28, 4, 128), None, 144),
    "Qwen/Qwen3-VL-4B-Instruct": ((36, 8, 128), None, 100),
    "Qwen/Qwen3-VL-8B-Instruct": ((36, 8, 128), None, 100),
    "zai-org/GLM-4.1V-9B-Thinking": ((40, 2, 128), 10_292_777_472, 144),
    # without the 45 x 128 biases of its experts' choice, which are buffers
    "zai-org/GLM-4.5V": ((46, 8, 128), 107_710_933_120 - 45 * 128, 144),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_the_hubs_shapes(name):
    shape, parameters, tokens = PUBLISHED[name]
    family = layout_family(BackboneConfig(name, dtype="bfloat16"))
    assert (family.shape.num_layers, family.shape.num_kv_heads, family.shape.head_dim) == shape
    assert parameters in (None, sum(parameter.numel() for parameter in family.model.parameters()))
    assert tokens is None or family.visual_tokens() == family.visual_tokens(family.nominal_image) == tokens


@pytest.mark.parametrize(
    ("name", "cap", "sizes", "tokens", "pixels"),
    [
        ("OpenGVLab/InternVL3-1B-hf", None, [(480, 640)], [13 * 256], 5 * 3 * 448**2),
        ("OpenGVLab/InternVL3-1B-hf", 6 * 448**2 + 1, [(480, 640), (400, 900), (448, 448)], [1792, 768, 256], None),
        ("HuggingFaceTB/SmolVLM-256M-Instruct", None, [(640, 480)], [13 * 64], 13 * 3 * 512**2),
        ("HuggingFaceTB/SmolVLM-256M-Instruct", 512**2 * 5, [(480, 640), (100, 400), (9, 9)], [320, 192, 320], None),
        ("HuggingFaceTB/SmolVLM-256M-Instruct", 512**2, [(480, 640)], [64], None),
        ("mistralai/Mistral-Small-3.1-24B-Instruct-2503", None, [(3080, 1540)], [55 * 28], 3 * 672 * 896),
        ("mistralai/Mistral-Small-3.1-24B-Instruct-2503", 900_000, [(2000, 2000)], [33 * 33], None),
        ("zai-org/GLM-4.1V-9B-Thinking", None, [(4000, 4000)], [35 * 35], None),
        ("llava-hf/llava-v1.6-vicuna-7b-hf", None, [(672, 672)], [2928], 5 * 3 * 336**2),
        ("llava-hf/llava-onevision-qwen2-7b-ov-hf", None, [(384, 384)], [729 + 27 * 28], None),
    ],
)
def test_tokens_and_bytes_of_pictures_of_published_models(name, cap, sizes, tokens, pixels):
    family = layout_family(BackboneConfig(name, dtype="bfloat16", max_pixels=cap))
    assert [family.visual_tokens(size) for size in sizes] == tokens
    assert pixels is None or family.image_bytes() == 4 * pixels


def halved(given, images):
    return {"pixel_values": given["pixel_values"][..., : given["pixel_values"].shape[-1] // 2]}


def fewer(given, images):
    return {"pixel_values": given["pixel_values"][1:]}


def hidden(given, images):
    mask = given["pixel_attention_mask"].clone()
    mask[0, 0, 0, 0] = 0
    return {"pixel_attention_mask": mask}


def cut_run(given, images):
    ids = given["input_ids"].clone()
    ids[0, (ids[0] == built("internvl qwen2").image_token_id).nonzero()[0, 0]] = 9
    return {"input_ids": ids}


MADE_OTHERWISE = {
    "internvl: half": ("internvl qwen2", halved, r"tiles of \[3, 32, 16\]: internvl takes \[3, 32, 32\]"),
    "internvl: fewer": ("internvl qwen2", fewer, "48 image tokens for 11 tiles: internvl takes 4 a tile"),
    "internvl: a run": ("internvl qwen2", cut_run, "11 image tokens for 3 tiles: internvl takes 4"),
    "idefics: flat": (
        "idefics3",
        lambda given, _: {"pixel_values": given["pixel_values"][0]},
        r"must be \[prompts, tiles, 3, height, width\]",
    ),
    "idefics: half": ("smolvlm", halved, r"tiles of \[3, 32, 16\]: smolvlm takes \[3, 32, 32\]"),
    "idefics: a tile of zeros": (
        "idefics3",
        lambda given, _: {"pixel_values": given["pixel_values"].index_fill(1, torch.tensor(0), 0)},
        "28 image tokens for 6 tiles: .* takes 4 a tile",
    ),
    "idefics: a mask": ("idefics3", hidden, "pixel_attention_mask hides a part of a tile"),
    "mistral: sizes": (
        "mistral",
        lambda given, _: {"image_sizes": given["image_sizes"] - 8},
        "in multiples of 16; pass the processor's whole output",
    ),
    "mistral: fewer": (
        "mistral",
        lambda given, _: {**fewer(given, _), "image_sizes": given["image_sizes"][1:]},
        "pictures of .* visual tokens but prompts of",
    ),
    "next: half": ("llava_next mistral", halved, r"18 tiles of \(3, 24, 12\) but this .* takes 18 of \(3, 24, 24\)"),
    "next: fewer tiles": (
        "llava_next mistral",
        lambda given, _: {"pixel_values": given["pixel_values"][:, :4]},
        r"16 tiles of \(3, 24, 24\) but this llava_next takes 18 of .* for images of \[\(30, 50\), \(61, 17\)",
    ),
    "next: fewer": ("llava_next mistral", fewer, "pixel_values of 3 images but image_sizes of 4"),
    "next: no sizes": ("llava_next mistral", lambda *_: {"image_sizes": None}, "pass the processor's whole output"),
    "next: flat": (
        "llava_next mistral",
        lambda given, _: {"pixel_values": given["pixel_values"][0, 0]},
        r"with image_sizes \[images, 2\]; pass the processor's whole output",
    ),
    "next: swapped": (
        "llava_next mistral",
        lambda given, _: {name: given[name].flip(0) for name in ("image_sizes", "pixel_values")},
        "pictures of .* visual tokens but prompts of",
    ),
}


@pytest.mark.parametrize(("kind", "change", "words"), MADE_OTHERWISE.values(), ids=MADE_OTHERWISE)
def test_what_is_no_processors_output_is_refused(kind, change, words):
    images = noises(CASES[kind].sizes)
    given = CASES[kind].inputs(built(kind), images, "left")
    refuses(words, lambda: batch_of(built(kind), {**given, **change(given, images)}))


def spoiled(kind: str, **settings: object) -> list[torch.Tensor]:
    """A family whose image processor is another checkpoint's makes pictures."""
    family = CASES[kind].build()
    for name, value in settings.items():
        setattr(family.processor.image_processor, name, value)
    return family.process_images(noises(CASES[kind].sizes))


IMAGE = noises([(30, 40)])[0]
NOT_TAKEN = {
    "internvl: layer": (lambda: internvl.internvl_family(vision_feature_layer=-2), "feature_layer -2 .* not supported"),
    "internvl: cap": (lambda: built("internvl qwen2").limit_pixels(1000), "1000 is below one tile of internvl, 1024"),
    "internvl: quest": (lambda: compress(built("internvl qwen2"), name="quest", keep_ratio=0.5), "of a language model"),
    "internvl: processor": (lambda: spoiled("internvl qwen2", size={"height": 16, "width": 16}), "same checkpoint"),
    "idefics: merge": (lambda: idefics3.idefics_family("idefics3", scale_factor=3), "4 x 4 patches and scale_factor 3"),
    "idefics: cap": (lambda: built("smolvlm").limit_pixels(1000), "1000 is below one tile of smolvlm, 1024 pixels"),
    "idefics: processor": (lambda: spoiled("smolvlm", max_image_size={"longest_edge": 16}), "of the same checkpoint"),
    "mistral: layer": (lambda: mistral3.mistral3_family(vision_feature_layer=-2), "layer -2 is not read; -1 is"),
    "mistral: cap": (lambda: built("mistral").limit_pixels(200), "200 is below one visual token of mistral3, 256"),
    "mistral: video": (lambda: inputs_of(built("mistral"), "<video> ?", [Video((IMAGE,))]), "images and no videos"),
    "next: class token": (
        lambda: llava_next.next_family(vision_feature_select_strategy="full"),
        "'full' of llava_next",
    ),
    "next: cap": (lambda: built("llava_next llama").limit_pixels(9), "llava_next scales images to sizes of its own"),
    "next: video": (
        lambda: built("llava_next llama").picture_text(Video((IMAGE,)), "<image>"),
        "llava_next takes images and no videos",
    ),
    "next: processor": (
        lambda: spoiled("llava_next llama", image_grid_pinpoints=[[48, 24]]),
        "the checkpoint's own proc",
    ),
}
test_what_a_family_does_not_take_is_refused_in_words = refusing(NOT_TAKEN)
