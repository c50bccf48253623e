import pytest

from subtoken_train.plugins.harness import GreedySettings, greedy_settings


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, GreedySettings(7, ())),
        ({"until": None}, GreedySettings(7, ())),
        ({"until": "\n", "max_gen_toks": 3}, GreedySettings(3, ("\n",))),
        ({"until": ["\n", "", "Q:"], "max_new_tokens": 5}, GreedySettings(5, ("\n", "Q:"))),
        ({"max_gen_toks": 3, "max_tokens": 9}, GreedySettings(3, ())),
        ({"do_sample": False, "temperature": 0.8, "top_p": 0.9, "num_beams": 1}, GreedySettings(7, ())),
        ({"temperature": 0.0, "image_sizes": [3]}, GreedySettings(7, ())),
    ],
)
def test_greedy_settings(given, wanted):
    assert greedy_settings(given, 7, ignored=("image_sizes",)) == wanted


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"do_sample": True}, "answers are greedy"),
        ({"temperature": 0.5}, "temperature=0.5: answers are greedy"),
        ({"num_beams": 4}, "num_beams=4: answers are greedy"),
        ({"repetition_penalty": 1.2}, "repetition_penalty=1.2 does not go with greedy decoding"),
        ({"max_gen_toks": 0}, "an answer of 0 tokens"),
    ],
)
def test_what_is_not_greedy_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        greedy_settings(given, 7)
