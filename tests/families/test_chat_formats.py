"""Chat formats of families, as text and spans; LLaVA's modes as settings of a backbone."""

import json
from functools import partial

import pytest

from subtoken_train.artifact.config import read_config
from subtoken_train.families.backbone_config import BackboneConfig, check_backbone
from subtoken_train.families.load import layout_family, load_family
from subtoken_train.inference.pool import load_backbone
from subtoken_train.types import Turn
from tests.support.helpers import write_vlm_adapter
from tests.support.text_families import text_family
from tests.support.tiny.idefics3 import idefics_family
from tests.support.tiny.internvl import internvl_family
from tests.support.tiny.llava import next_family
from tests.support.tiny.llava_onevision import onevision_family
from tests.support.tiny.mistral3 import mistral3_family
from tests.support.tiny.qwen import glm_family, qwen2_family, qwen3_family, qwen_family

USER = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions. "
)
HUMAN = USER.replace("user", "human")
PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
QWEN = (
    f"<|im_start|>user\nat{PICTURE}{PICTURE}where ?<|im_end|>\n<|im_start|>assistant\nleft<|im_end|>\n"
    "<|im_start|>user\nlast<|im_end|>\n<|im_start|>assistant\n"
)
SYSTEM = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
VICUNA = "USER: <image>\n<image>\nat \n\nwhere ? ASSISTANT: left</s>USER: last ASSISTANT:"
GLM = "[gMASK]<sop><|user|>\nat<|image|><|image|>where ?{}left<|user|>\nlast{}"
TURNS = [Turn("at \n<image>\n<image>where ? ", " left "), Turn("last")]
FORMATS = {
    # a family, the text of TURNS, the answer's span
    "llava": (partial(load_family, BackboneConfig()), f"<s>{VICUNA}", " left</s>"),
    "llava, system": (partial(load_family, BackboneConfig(system="vicuna_v1")), f"<s>{USER}{VICUNA}", " left</s>"),
    "llava_v1": (partial(load_family, BackboneConfig(template="llava_v1")), f"<s>{HUMAN}{VICUNA}", " left</s>"),
    "llava_next vicuna": (partial(next_family, "llama"), f"<s>{HUMAN}{VICUNA}", " left</s>"),
    "llava_next mistral": (
        next_family,
        "<s>[INST] <image>\n<image>\nat \n\nwhere ? [/INST] left</s> [INST] last [/INST]",
        " left</s>",
    ),
    "onevision": (
        onevision_family,
        "<|im_start|>user\n<image>\n<image>\nat \n\nwhere ?<|im_end|>\n<|im_start|>assistant\nleft<|im_end|>\n"
        "<|im_start|>user\nlast<|im_end|>\n<|im_start|>assistant\n",
        "left<|im_end|>",
    ),
    "qwen2_vl": (qwen2_family, SYSTEM + QWEN, "left<|im_end|>"),
    "qwen2_5_vl": (qwen_family, SYSTEM + QWEN, "left<|im_end|>"),
    "qwen3_vl": (qwen3_family, QWEN, "left<|im_end|>"),
    "internvl": (
        internvl_family,
        "<|im_start|>user\nat \n<IMG_CONTEXT>\n<IMG_CONTEXT>where ?<|im_end|>\n<|im_start|>assistant\nleft<|im_end|>\n"
        "<|im_start|>user\nlast<|im_end|>\n<|im_start|>assistant\n",
        "left<|im_end|>",
    ),
    "idefics3": (
        idefics_family,
        "<|im_start|>User: at<image><image>where ?<end_of_utterance>\nAssistant: left<end_of_utterance>\n"
        "User: last<end_of_utterance>\nAssistant:",
        " left<end_of_utterance>",
    ),
    "mistral3": (mistral3_family, "<s>[INST]at[IMG][IMG]where ?[/INST]left</s>[INST]last[/INST]", "left</s>"),
    "glm4v": (glm_family, GLM.format(*["<|assistant|>\n"] * 2), "left<|user|>"),
    "glm4v_moe": (
        partial(glm_family, experts=True),
        GLM.format(*["/nothink<|assistant|>\n<think></think>\n"] * 2),
        "left<|user|>",
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_the_format_is_the_published_template(name):
    build, text, answer = FORMATS[name]
    family = build()
    rendered = family.render(TURNS)
    assert rendered.text == text
    assert [rendered.text[start:stop] for start, stop in rendered.answer_spans] == [answer]
    assert rendered.image_marker == family.processor.image_token


def test_yis_format_is_the_published_template(tiny_family):
    family = layout_family(BackboneConfig("llava-hf/llava-v1.6-34b-hf", dtype="bfloat16"))
    rendered = family.chat.render(
        [Turn("<image>\nwhat is left?", " red "), Turn("and now?")], "<image>", tiny_family.tokenizer
    )
    assert rendered.text == (
        "<|im_start|>system\nAnswer the questions.<|im_end|><|im_start|>user\n<image>\nwhat is left?<|im_end|>"
        "<|im_start|>assistant\nred<|im_end|><|im_start|>user\nand now?<|im_end|><|im_start|>assistant\n"
    )
    assert [rendered.text[start:stop] for start, stop in rendered.answer_spans] == ["red<|im_end|>"]


def test_an_answer_that_begins_with_a_picture_has_no_space_in_idefics():
    assert idefics_family().render([Turn("<image>\nwhat?")]).text.startswith("<|im_start|>User:<image>what?")


def test_plain_is_an_image_and_its_caption():
    family = load_family(BackboneConfig(template="plain"))
    learnt = family.render([Turn("<image>\nDescribe it.", "A cat.")])
    assert (learnt.text, learnt.answer_spans) == ("<s><image>A cat.\n", [(10, 17)])
    assert family.render([Turn("Describe it. <image>")]).text == "<s><image>\nDescribe it.\n"
    with pytest.raises(ValueError, match=r"one image and its caption, not 2 turns; use 'vicuna_v1'"):
        family.render(TURNS)
    with pytest.raises(ValueError, match=r"the caption of one image, and the turn shows 2"):
        family.render([Turn("<image>\n<image>\n", "A cat.")])


@pytest.mark.parametrize(
    ("settings", "system"),
    [
        ({}, {"system": 5, "query": 14}),
        ({"template": "plain"}, {"system": 1, "query": 10}),
        ({"system": "vicuna_v1"}, {"system": 35, "query": 14}),
        ({"path": "llava-hf/llava-v1.6-vicuna-7b-hf"}, {"system": 35, "query": 14}),
        ({"path": "llava-hf/llava-v1.6-mistral-7b-hf"}, {"system": 5, "query": 14}),
        ({"path": "llava-hf/llava-v1.6-34b-hf"}, {"system": 11, "query": 14}),
    ],
)
def test_nominal_prompts_have_the_formats_system_text(settings, system):
    assert layout_family(BackboneConfig(**settings)).nominal_text == system


@pytest.mark.slow
def test_an_adapter_remembers_its_mode(tmp_path):
    folder = write_vlm_adapter(tmp_path)
    prompt = [Turn("<image>\nwhat ?")]
    assert read_config(folder).backbone.template is None  # what is not chosen is the family's own
    path = folder / "subtoken_config.json"
    written = json.loads(path.read_text())
    path.write_text(json.dumps({**written, "backbone": {**written["backbone"], "system": "vicuna_v1"}}))
    asked = load_backbone(folder).family.render(prompt).text
    assert asked == f"<s>{USER}USER: <image>\nwhat ? ASSISTANT:"
    older = {key: value for key, value in written["backbone"].items() if key not in ("template", "system")}
    path.write_text(json.dumps({**written, "backbone": older}))
    assert load_backbone(folder).family.render(prompt).text == "<s>USER: <image>\nwhat ? ASSISTANT:"
    path.write_text(json.dumps({**written, "backbone": {**older, "template": "alpaca"}}))
    with pytest.raises(ValueError, match=r"subtoken_config\.json: unknown template 'alpaca'"):
        read_config(folder)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"template": "vicuna"}, "unknown template 'vicuna'.*vicuna_v1"),
        ({"system": "You are kind."}, "unknown system 'You are kind.'"),
        ({"template": "plain", "system": "vicuna_v1"}, "of template 'vicuna_v1', not of 'plain'; remove it"),
        ({"template": "llava_v1", "system": "vicuna_v1"}, "is the text of template 'vicuna_v1', not of 'llava_v1'"),
        ({"template": "llava_v1", "system": "none"}, "differs only in its system text; remove system"),
    ],
)
def test_names_that_do_not_go_together(settings, message):
    with pytest.raises(ValueError, match=message):
        check_backbone(BackboneConfig(**settings))


def test_other_families_have_one_format(tmp_path):
    text_family("llama").model.config.save_pretrained(tmp_path)  # and no weights: it is refused before they are missed
    for settings in ({"template": "plain"}, {"system": "none"}):
        (name,) = settings
        for act in (load_family, layout_family):
            with pytest.raises(ValueError, match=f"{name}='.*': a language model has one chat format; remove {name}"):
                act(BackboneConfig(path=str(tmp_path), **settings))
