"""What a task asks, within LLaVA's conversation: the reference's own words, but for its system text."""

import pytest

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


def test_a_question(tiny_family):
    assert rendered(tiny_family, [Turn(ASKED)]) == f"USER: {ASKED} ASSISTANT:"


def test_reference_conversations(shared, tiny_family):
    cases = [case for case in reference_cases(shared, "prompts") if case["task"] == "llava_conversation"]
    compared = 0
    for case in cases:
        said = case.get("turns") or [case["user_text"], None]
        words = said[0].removeprefix("<image>\n")
        if case["conv_mode"] != "vicuna_v1" or words != words.strip():
            continue
        turns = [Turn(prompt, answer) for prompt, answer in zip(said[::2], said[1::2], strict=True)]
        expected = case["prompt"].removeprefix(SYSTEM)
        assert expected != case["prompt"]
        assert rendered(tiny_family, turns) == expected.replace("</s>", tiny_family.tokenizer.eos_token)
        compared += 1
    assert compared


def test_space_around_a_question_is_stripped(tiny_family):
    assert rendered(tiny_family, [Turn("<image>\n why? ")]) == "USER: <image>\nwhy? ASSISTANT:"


@pytest.mark.parametrize("images", [0, 2])
def test_as_many_placeholders_as_images(tiny_family, images):
    text = "<image>\n" * images + "why?"
    assert rendered(tiny_family, [Turn(text)]) == f"USER: {text} ASSISTANT:"
