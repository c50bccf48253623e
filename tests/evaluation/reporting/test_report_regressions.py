"""Which samples are shown, what is drawn over their pictures, and what is said where there is none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from subtoken_train.evaluation.reporting.regressions import (
    FOG,
    SIDE,
    WORST,
    TaskFiles,
    kept_bits,
    kept_over,
    worst_regressions,
)
from subtoken_train.evaluation.reporting.runs import read_results
from tests.support.report_results import answers, facts, record, register, write_run


def write_pair(folder, task="pope", routed=range(30), source=None):
    write_run(folder, facts("anchor", 0.25, reducer="fastv 0.25"), task, answers(range(28)), source=source)
    arm = facts("arm", 0.25, reducer="fastv 0.5", groups="S8K0 linear", anchor="anchor")
    write_run(folder, arm, task, answers(routed, wrong="perhaps"), source=source)


@pytest.fixture(autouse=True)
def tasks(monkeypatch):
    register(monkeypatch, "pope", "gqa")


def test_samples_in_turn_with_both_answers(tmp_path):
    source = tmp_path / "files"
    source.mkdir()
    write_pair(tmp_path / "r", routed=range(25), source=str(source))
    write_pair(tmp_path / "r", "gqa", routed=range(2, 40), source=str(source))
    found = worst_regressions(read_results([tmp_path / "r"]), TaskFiles())
    assert list(found) == ["arm"]
    assert [(each.task, each.sample_id) for each in found["arm"]] == [
        ("gqa", "0"), ("gqa", "1"), ("pope", "25"), ("pope", "26"), ("pope", "27"),
    ]  # fmt: skip
    first = found["arm"][0]
    assert (first.ours.text, first.ours.score, first.anchor.text, first.anchor.score) == ("perhaps", 0, "yes", 1)
    assert first.question == "<image>\nIs it 0?"
    assert first.reference == {"answer": "yes"}
    assert first.ours.kept == "4 of 16 visual tokens kept in the last layer"
    assert first.ours.picture.size == (SIDE, SIDE)
    assert first.remark == ""


def test_no_more_than_the_worst(tmp_path):
    write_pair(tmp_path, routed=[])
    (found,) = worst_regressions(read_results([tmp_path]), TaskFiles()).values()
    assert len(found) == WORST
    assert [each.sample_id for each in found] == [str(i) for i in range(WORST)]


def test_pictures_that_are_not_available(tmp_path):
    write_pair(tmp_path / "r", routed=range(25))

    def remark(data_root=None):
        arms = read_results([tmp_path / "r"])
        each = worst_regressions(arms, TaskFiles(data_root))["arm"][0]
        return each.remark, each.question, each.ours.picture

    assert remark() == (
        "question and picture are not available (they were read from the Hub); "
        "--data-root names the folder that holds pope/", None, None,
    )  # fmt: skip
    root = tmp_path / "data"
    assert f"(no {root / 'pope'})" in remark(root)[0]
    (root / "pope").mkdir(parents=True)
    assert remark(root)[0] == ""
    (root / "pope" / "broken").touch()
    assert "broken is malformed" in remark(root)[0]


def test_files_that_hold_another_sample(tmp_path):
    (tmp_path / "pope").mkdir()
    write_pair(tmp_path / "r")
    manifest = read_results([tmp_path / "r"])[0].runs["pope"][None].manifest
    files = TaskFiles(tmp_path)
    assert files.sample(manifest, record(3, "yes", 1.0))[0].id == "3"
    for other in (record(99, "yes", 1.0), replace(record(3, "yes", 1.0), prompt_sha256="of another prompt")):
        sample, words = files.sample(manifest, other)
        assert sample is None
        assert "the files of pope here hold another sample" in words


def test_bits_of_a_square_grid():
    kept = np.arange(25) % 3 == 0
    assert kept_bits(np.packbits(kept).tobytes().hex()[:7], 28) == kept.tolist()  # three bits fill the last digit
    assert kept_bits("f" * 144, 576) == [True] * 576
    assert kept_bits("0001", 16) == [False] * 15 + [True]
    assert kept_bits("ffffff", 24) is None  # 21 to 24 tokens are no square
    assert kept_bits("ffff", None) is None


def test_dropped_tokens_are_dimmed_where_the_model_saw_them():
    image = Image.new("RGB", (80, 40), (255, 0, 0))  # padded to 80 x 80: bars above and below
    seen = np.asarray(kept_over(image, [True] * 8 + [False] * 8))
    height = seen.shape[0]
    assert tuple(seen[0, 0]) != (255, 0, 0)
    assert tuple(seen[height // 2 - 3, 5]) == (255, 0, 0)
    dimmed = seen[height // 2 + 3, 5].astype(int)
    assert np.abs(dimmed - np.array(FOG)).max() < np.abs(np.array((255, 0, 0)) - np.array(FOG)).max() * 0.25
