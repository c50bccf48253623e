"""Clozes of packages' own text: answers stand where they are asked for, halves share nothing, mistakes are one line."""

import re
import shutil
import sysconfig
from pathlib import Path

import pytest

from checkpoints.tiny_llama import build_tokenizer
from subtoken_train.evaluation.runner.cell import Cell, answered, model_inputs
from subtoken_train.evaluation.tasks import build_task
from subtoken_train.evaluation.tasks.clozes import ClozeScores
from subtoken_train.inference.compression import Compression
from tests.support.benchmark_folders import refused
from tests.support.helpers import compress
from tests.support.text_families import text_family

BOTH = pytest.mark.parametrize("name", ["manual_qa", "code_lines"])


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    folder = tmp_path_factory.mktemp("package")
    for name in "argparse calendar difflib doctest optparse pdb statistics tarfile turtle zipfile".split():
        shutil.copy(Path(sysconfig.get_paths()["stdlib"], f"{name}.py"), folder)
    return folder


def made(name, folder, **options):
    samples = build_task(name, folder, **{"contexts": 3, "characters": 3000, **options}).samples()
    return [(sample.prompt[: sample.context_characters], sample) for sample in samples]


@BOTH
def test_the_text_goes_on_with_the_answer(package, name):
    files = sorted(package.iterdir())
    whole, once = "".join(path.read_text(encoding="utf-8") for path in files), name == "manual_qa"
    for context, sample in made(name, package, questions=1 + once):
        (answer, line), asked = sample.choices, sample.prompt[len(context) :]
        word = re.search(r"\w+", answer)[0]
        assert 1500 < len(context) <= 3000
        assert line.startswith(answer)
        assert (answer.strip(), word in asked) == (sample.reference["answer"], False)
        assert (context.count(word) == 1) == once
        if once:
            assert f"{asked.partition('Answer: ')[2]}{line}" in context
        else:
            assert asked + line in whole


@BOTH
def test_a_seed_says_which_and_halves_share_no_text(package, name):
    dev, again, other, test = (
        made(name, package, half=half, seed=seed) for half, seed in (("dev", 0), ("dev", 0), ("dev", 1), ("test", 0))
    )
    assert dev == again != other
    lines = [{line for context, _ in part for line in context.splitlines() if len(line) > 70} for part in (dev, test)]
    assert all(lines)
    assert lines[0].isdisjoint(lines[1])


def test_one_pass_scores_what_greedy_decoding_says(package):
    family = text_family("llama", vocab_size=len(tokenizer := build_tokenizer()))
    family.processor = tokenizer
    ((_, sample),) = made("code_lines", package, contexts=1)
    cell = Cell([sample], ClozeScores(), lambda batch: model_inputs(batch, family, "text", None), Compression())
    (((record, outcome),),) = answered(cell, compress(family), [[sample]])
    assert record.prediction == [*outcome.logprobs, *map(float, outcome.greedy)]
    assert record.score == float(outcome.greedy[0])
    assert ClozeScores.figures([-1.0, -3.0, 1.0, 0.0], {}) == {"accuracy": 1, "line": 0, "nats": 3}


def test_mistakes(package, tmp_path):
    refused("manual_qa: .* has 0 of 60 contexts in its test half; ask for fewer or shorter ones", "manual_qa", tmp_path)
    refused(r"has \d+ of 60 contexts in its dev half", "code_lines", package, half="dev", characters=20_000)
    for name in "abcd":  # a half has one of them at least
        (tmp_path / f"{name}.py").write_text("print 'old'")
    refused(r"\w\.py is not Python of this version \(.*\); leave it out of the folder", "manual_qa", tmp_path)
