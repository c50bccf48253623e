"""What a task asks, within LLaVA's conversation modes: the reference's own words."""

from types import SimpleNamespace

import pytest

from subtoken_train.families.chat import llava_chat
from subtoken_train.types import Turn
from tests.support.vqa_cases import reference_cases

SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions. "
)
ASKED = "<image>\nIs there a dog in the image?\nAnswer the question using a single word or phrase."


def rendered(family, turns):
    """The conversation without its BOS."""
    return family.render(turns).text.removeprefix(family.tokenizer.bos_token or "")


@pytest.mark.parametrize("mode", ["vicuna_v1", "llava_v1", "plain"])
def test_reference_conversations(shared, tiny_family, mode):
    cases = [case for case in reference_cases(shared, "prompts") if case["task"] == "llava_conversation"]
    cases = [case for case in cases if case["conv_mode"] == mode]
    assert cases
    for case in cases:
        said = case.get("turns") or [case["user_text"], None]
        turns = [Turn(prompt, answer) for prompt, answer in zip(said[::2], said[1::2], strict=True)]
        chat = llava_chat(mode, "vicuna_v1" if mode == "vicuna_v1" else "none")
        ends = SimpleNamespace(bos_token="", eos_token="</s>")
        assert chat.render(turns, "<image>", ends).text == case["prompt"]
        if mode == "vicuna_v1":
            expected = case["prompt"].removeprefix(SYSTEM)
            assert expected != case["prompt"]
            assert rendered(tiny_family, turns) == expected.replace("</s>", tiny_family.tokenizer.eos_token)


def test_space_around_a_question_is_kept(tiny_family):
    assert rendered(tiny_family, [Turn("<image>\n why? ")]) == "USER: <image>\n why?  ASSISTANT:"
    assert rendered(tiny_family, [Turn("\twhy?\n")]) == "USER: \twhy?\n ASSISTANT:"
    assert rendered(tiny_family, [Turn(" why? <image> ")]) == "USER: <image>\nwhy? ASSISTANT:"  # as LLaVA moves it
