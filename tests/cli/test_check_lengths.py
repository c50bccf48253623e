"""What ``check`` says of lengths and of the time that a run will take."""

import json
import re

import pytest

from tests.support.commands import check_refused, checked, stopped
from tests.support.places import recipe
from tests.support.run_folders import inits, own_images

TINY = ["--config", str(recipe("tiny_fastv25_s16k4"))]


@pytest.fixture
def records(tmp_path):
    """Ten records about images; in the third more is asked than others say."""
    own_images(tmp_path / "mine")
    rows = []
    for number in range(10):
        words = "list . " * (30 if number == 3 else 1) + "describe ." * (20 if number == 5 else 1)
        turns = [{"from": "human", "value": f"<image>\n{words}"}, {"from": "gpt", "value": "none " * (number + 1)}]
        rows.append({"id": f"r{number}", "image": f"images/{number % 6:02d}.png", "conversations": turns})
    (tmp_path / "mine/train.json").write_text(json.dumps(rows))
    return tmp_path / "mine/train.json"


def of(records, *more):
    return [*TINY, "--data.train_file", str(records), "--data.batch_size", "2", *more]


def line_of(lines, start):
    return next(line for line in lines if line.startswith(start))


@pytest.mark.slow
def test_lengths_of_all_records(capsys, records):
    lines = checked(capsys, of(records))
    words = line_of(lines, "tokens of all 10 records: ")
    shortest, median, longest = map(int, re.findall(r"(\d+) (?:shortest|median|longest)", words))
    assert 64 < shortest < median < longest
    assert words.endswith("max_length 160 cuts none")
    first = int(re.search(r"first record 'r0': (\d+) tokens", "\n".join(lines))[1])
    assert first == shortest
    cut = line_of(checked(capsys, of(records, "--data.max_length", str(longest - 1))), "tokens of all 10")
    assert f"max_length {longest - 1} cuts 1 (10 %)" in cut
    lines, message = stopped(capsys, of(records, "--data.max_length", str(shortest + 20)))
    in_a_question = r"cuts \d \(\d0 %\), ([12]) of them in a question, where fit stops"
    inside = re.search(in_a_question, line_of(lines, "tokens of all 10"))[1]
    words = f"fit would stop: data.max_length {shortest + 20} cuts the questions of {inside} of 10 records; raise"
    assert message.startswith(words)


def test_records_that_cannot_be_used_are_counted(capsys, records):
    (records.parent / "images/04.png").write_bytes(b"none")
    lines, message = stopped(capsys, of(records))
    assert line_of(lines, "1 of 10 cannot be used: record 'r4': image")
    assert message.startswith("fit would stop: record 'r4': image")


@pytest.mark.slow
def test_the_time_is_measured(capsys, records):
    argv = of(records, "--trainer.max_steps", "7", "--trainer.accumulate_grad_batches", "2")
    words = line_of(checked(capsys, argv), "expected time: about ")
    measured = r"about (\d+) s \(([\d.]+) s a batch, measured now on this machine; start, logs, validation and check"
    total, each = re.match(f"expected time: {measured}", words).groups()
    assert abs(int(total) - max(1, 14 * float(each))) <= 1 + 14 * float(each) / 20


def test_a_time_that_cannot_be_told_says_why(capsys, records):
    for option, why in (
        ("--trainer.accelerator=gpu", "training is to run on an accelerator"),
        ("--trainer.precision=bf16-mixed", "in this precision"),
        ("--model.distillation.weight=1", "with a teacher or in stage 2"),
    ):
        words = f"expected time: not measured ({why}); fit shows its pace from the first steps on"
        assert words in checked(capsys, of(records, option))


def test_texts(capsys, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/book.txt").write_text("\n\n".join(f"Fact {i} of it is {'so ' * 90}." for i in range(150)))
    inits(capsys, "mine")
    argv = ["--config", "mine_subtoken/mine.yaml"]
    lines = checked(capsys, argv)
    words = line_of(lines, "tokens of all ")
    blocks = int(re.search(r"documents: .* together, about (\d+) blocks", words)[1])
    assert blocks >= 2
    assert line_of(lines, "expected time: about ")
    assert "fewer than one block of block_length 99,999" in check_refused(
        capsys, [*argv, "--data.block_length", "99999"]
    )
