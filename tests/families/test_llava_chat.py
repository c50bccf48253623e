"""LLaVA's conversation modes as settings of a backbone."""

import json
from types import SimpleNamespace

import pytest

from subtoken_train.artifact.config import read_config
from subtoken_train.families.backbone_config import BackboneConfig, check_backbone
from subtoken_train.families.chat import llava_chat
from subtoken_train.families.load import layout_family, load_family
from subtoken_train.inference.pool import load_backbone
from subtoken_train.types import Turn
from tests.support.helpers import write_vlm_adapter
from tests.support.text_families import text_family

USER = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions. "
)
HUMAN = USER.replace("user", "human")
TURNS = [Turn("<image>\nwhat ?", " red "), Turn(" and now ? ", "blue"), Turn("why ?")]


def text_of(turns=TURNS, **settings):
    ends = SimpleNamespace(bos_token="<s>", eos_token="</s>")
    rendered = llava_chat(**settings).render(turns, "<image>", ends)
    return rendered.text, [rendered.text[start:stop] for start, stop in rendered.answer_spans]


@pytest.mark.parametrize(
    ("settings", "system"),
    [({}, ""), ({"system": "vicuna_v1"}, USER), ({"template": "llava_v1"}, HUMAN)],
)
def test_system_texts_stand_once(settings, system):
    text, answers = text_of(**settings)
    said = "USER: <image>\nwhat ? ASSISTANT: red</s>USER:  and now ?  ASSISTANT: blue</s>USER: why ? ASSISTANT:"
    assert text == f"<s>{system}{said}"
    assert answers == [" red</s>", " blue</s>"]


def test_plain_is_an_image_and_its_caption():
    assert text_of([Turn("<image>\nDescribe it.", "A cat.")], template="plain") == ("<s><image>A cat.\n", ["A cat.\n"])
    assert text_of([Turn("Describe it. <image>")], template="plain") == ("<s><image>\nDescribe it.\n", [])
    with pytest.raises(ValueError, match=r"one image and its caption, not 3 turns; use 'vicuna_v1'"):
        text_of(template="plain")
    with pytest.raises(ValueError, match=r"the caption of one image, and the turn shows 2"):
        text_of([Turn("<image>\n<image>\n", "A cat.")], template="plain")


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
        (
            {"template": "plain", "system": "vicuna_v1"},
            "of template 'vicuna_v1', not of 'plain'; remove it",
        ),
        ({"template": "llava_v1", "system": "vicuna_v1"}, "is the text of template 'vicuna_v1', not of 'llava_v1'"),
        ({"template": "llava_v1", "system": "none"}, "differs only in its system text; remove system"),
    ],
)
def test_names_that_do_not_go_together(settings, message):
    with pytest.raises(ValueError, match=message):
        check_backbone(BackboneConfig(**settings))


def test_a_backbone_is_read_with_its_mode():
    prompt = [Turn("<image>\nwhat ?")]
    assert layout_family(BackboneConfig(template="plain")).nominal_text == {"system": 1, "query": 10}
    family = load_family(BackboneConfig(system="vicuna_v1"))
    assert family.render(prompt).text == f"<s>{USER}USER: <image>\nwhat ? ASSISTANT:"
    assert family.nominal_text == {"system": 35, "query": 14}
    assert load_family(BackboneConfig(template="vicuna_v1", system="none")).render(prompt).text == (
        "<s>USER: <image>\nwhat ? ASSISTANT:"
    )


def test_other_families_have_one_format(tmp_path):
    text_family("llama").model.config.save_pretrained(tmp_path)  # and no weights: it is refused before they are missed
    for settings in ({"template": "plain"}, {"system": "none"}):
        (name,) = settings
        with pytest.raises(ValueError, match=f"{name}='.*': a language model has one chat format; remove {name}"):
            load_family(BackboneConfig(path=str(tmp_path), **settings))
        with pytest.raises(ValueError, match=f"remove {name}"):
            layout_family(BackboneConfig(path=str(tmp_path), **settings))
