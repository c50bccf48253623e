"""The map of needles: where they stand, how long the texts are, what is refused, and its picture."""

from __future__ import annotations

import re

import pytest

from subtoken_train.evaluation.reporting.page import map_chart
from subtoken_train.evaluation.reporting.score_tables import Estimate, KindScores
from subtoken_train.evaluation.tasks import build_task
from subtoken_train.evaluation.tasks.needle_map import cell_of
from subtoken_train.evaluation.tasks.ruler import NEW_TOKENS, NOISE
from tests.support.places import ROOT

LLAMA, HAYSTACK = str(ROOT / "checkpoints/tiny-llama"), str(ROOT / "data/samples/reference.txt")
NEEDLE = re.compile(r"One of the special magic numbers for (\S+) is: (\d{7})\.")


@pytest.mark.parametrize("haystack", [None, HAYSTACK])
def test_needles_stand_where_the_map_says(haystack):
    task = build_task(
        "needle_map", lengths=[300, 700], depths=[0.0, 0.3, 1.0], samples_per_cell=2, tokenizer=LLAMA, haystack=haystack
    )
    samples = list(task.samples())
    assert len(samples) == task.expected_rows == 12
    assert [sample.id for sample in samples[:4]] == ["300-0-0", "300-0-1", "300-0.3-0", "300-0.3-1"]
    assert samples[2].kind == "300 long, depth 30 %"
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(LLAMA)
    for sample in samples:
        length, depth, _ = sample.id.split("-")
        tokens = len(tokenizer(sample.prompt, add_special_tokens=False)["input_ids"])
        assert int(length) - 60 < tokens + NEW_TOKENS["niah"] <= int(length)
        lines = sample.prompt[: sample.context_characters].splitlines()[1:]
        (place,) = (number for number, line in enumerate(lines) if NEEDLE.fullmatch(line))
        assert place == round(float(depth) * (len(lines) - 1))
        key, value = NEEDLE.fullmatch(lines[place]).groups()
        assert sample.reference == {"task": "niah_single_1", "answers": [value]}
        assert sample.prompt.endswith(f"special magic number for {key} mentioned in the provided text is")
        assert (NOISE in lines) == (haystack is None)
    assert len({sample.reference["answers"][0] for sample in samples}) == 2  # the same ones in every cell
    assert task.metric().score(f" {samples[0].reference['answers'][0]}.", samples[0].reference) == 1


def test_a_prompt_is_a_function_of_the_seed():
    one, same, other = (
        build_task("needle_map", lengths=[300], samples_per_cell=1, seed=seed).samples() for seed in (1, 1, 2)
    )
    assert one == same != other


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lengths": []}, "lengths of needle_map is []; name one or more, each once"),
        ({"depths": [0.5, 0.5]}, "depths of needle_map is"),
        ({"depths": [1.5]}, "depths of needle_map is 1.5; it must be 0 to 1"),
        ({"lengths": [0]}, "lengths of needle_map is 0; it must be 1 to"),
    ],
)
def test_options_that_are_refused(options, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        build_task("needle_map", **options)


def test_lengths_and_haystacks_that_are_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"length 150 of needle_map leaves 22 tokens or words .* raise it to \d+ or more"
    ):
        build_task("needle_map", lengths=[150]).check_options()
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(ValueError, match=r"empty\.txt holds no text"):
        build_task("needle_map", haystack=str(tmp_path / "empty.txt")).check_options()
    with pytest.raises(FileNotFoundError, match=r"nowhere\.txt"):
        build_task("needle_map", haystack=str(tmp_path / "nowhere.txt")).check_options()


def test_the_picture_has_a_map_of_each_arm():
    kinds = [f"{length} long, depth {depth} %" for length in ("512", "1,024") for depth in ("0", "50", "100")]
    cells = {kind: cell_of(kind) for kind in kinds}
    assert cells[kinds[-1]] == ("1,024", "100 %")
    assert cell_of("niah_single_1") is None
    value = {kind: Estimate(place / 5, None, None, None, 4) for place, kind in enumerate(kinds)}
    some = {kind: value[kind] for kind in kinds[:-1]}
    figure = map_chart(
        KindScores("needle_map", tuple(kinds), {"a": value, "b": some}, ("a", "b")), cells, {"a": "A", "b": "B"}
    )
    first, second = figure.axes
    assert [text.get_text() for text in first.texts] == ["0", "60", "20", "80", "40", "100"]  # row by row: a depth each
    assert [text.get_text() for text in second.texts][-1] == ""
    assert [label.get_text() for label in first.get_xticklabels()] == ["512", "1,024"]
    assert [label.get_text() for label in first.get_yticklabels()] == ["0 %", "50 %", "100 %"]
    assert (first.get_title(), second.get_title()) == ("A", "B")
