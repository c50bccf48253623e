"""Records survive: they are read back as written, a torn line is no record, and nothing appears twice."""

import os
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subtoken_train.evaluation import results
from subtoken_train.evaluation.results import Manifest, SampleRecord, SampleWriter, prompt_digest, read_samples
from subtoken_train.routing import RoutingConfig
from tests.support.eval_runs import MEASURED
from tests.support.refusals import refuses

RECORD = SampleRecord(
    id="a", kind="kind", prompt_sha256="0" * 64, reference={"answers": ["x"]}, prediction="text", score=1.0, **MEASURED
)
FACTS = results.ArmFacts("arm", "backbone", None, "-", "-", "-", "query_aware", "-", 1.0, None, False, None)


@given(st.text(), st.one_of(st.text(), st.lists(st.floats(allow_nan=False, allow_infinity=False))))
def test_a_record_is_one_line_and_reads_back(name, prediction):
    record = replace(RECORD, id=name, prediction=prediction)
    line = record.line()
    assert line.count("\n") == 1
    assert SampleRecord.parse(line, "here") == record
    assert SampleRecord.parse(line.replace("{", '{"kept_visual":"ff",', 1), "here") == record  # as 0.3 wrote them


@pytest.mark.parametrize("line", ["", "[]", "{}", "no json", RECORD.line().replace('"id"', '"name"')])
def test_what_is_no_record_names_its_place(line):
    refuses("here is not a record of a sample", SampleRecord.parse, line, "here")


def test_records_of_all_processes_are_read(tmp_path):
    for rank in range(2):
        SampleWriter(tmp_path, rank, 2).append([replace(RECORD, id=f"{rank}-{i}") for i in range(2)])
    SampleWriter(tmp_path).append([replace(RECORD, id="alone")])
    assert sorted(read_samples(tmp_path)) == ["0-0", "0-1", "1-0", "1-1", "alone"]


def test_a_torn_line_is_cut_and_the_rest_stays(tmp_path):
    """Within a character too; a file of one torn line is emptied."""
    path = tmp_path / "samples-0-of-1.jsonl"
    path.write_bytes('{"id": "ä'.encode()[:-1])
    assert read_samples(tmp_path) == {}
    writer = SampleWriter(tmp_path)
    assert path.read_bytes() == b""
    writer.append([RECORD, replace(RECORD, id="b")])
    path.write_text(path.read_text()[:-20])
    assert list(read_samples(tmp_path)) == ["a"]
    SampleWriter(tmp_path).append([replace(RECORD, id="c")])
    assert list(read_samples(tmp_path)) == ["a", "c"]


def test_a_device_in_the_place_of_records_is_not_read(tmp_path):
    (tmp_path / "samples-0-of-1.jsonl").symlink_to("/dev/zero")
    for read in (SampleWriter, read_samples):
        refuses("is not a regular file", read, tmp_path)


def test_a_huge_file_without_a_line_is_not_read_to_its_end(tmp_path):
    (tmp_path / "samples-0-of-1.jsonl").touch()
    os.truncate(tmp_path / "samples-0-of-1.jsonl", 2**40)  # a hole: a terabyte that takes no room
    refuses("ends with 16,777,216 bytes without a line break", SampleWriter, tmp_path)
    refuses("has a line of more than 16,777,216 bytes", read_samples, tmp_path)
    assert os.path.getsize(tmp_path / "samples-0-of-1.jsonl") == 2**40


def test_a_sample_twice_and_a_broken_line_name_their_places(tmp_path):
    for rank in (0, 1):
        SampleWriter(tmp_path, rank, 2).append([RECORD])
    refuses(r"samples-1-of-2\.jsonl, line 1: sample 'a' appears twice", read_samples, tmp_path)
    (tmp_path / "samples-1-of-2.jsonl").write_text(replace(RECORD, id="b").line() + "{}\n")
    refuses(r"samples-1-of-2\.jsonl, line 2 is not a record", read_samples, tmp_path)


def test_the_digest_is_of_all_that_is_asked():
    assert len({prompt_digest("a"), prompt_digest("b"), prompt_digest("a", ("b",)), prompt_digest("ab")}) == 4


def manifest(**changes):
    return Manifest(
        **{"arm": FACTS, "task": "recall", "options": {"contexts": 2}, "source": None, "rows": 2, "expected_rows": None,
           "primary": "score", "points": [], "samples_sha256": "0" * 64, **changes}
    )  # fmt: skip


@pytest.mark.parametrize("share", [0.5, 0.21875, 1e-5, 1.0])
def test_manifests_read_back(tmp_path, share):
    """What an arm of groups is called, too: of K groups of every token, and of a budget in bytes."""
    budget = RoutingConfig(budget="bytes", kept_groups=16, byte_share=share)
    for number, routing in enumerate((None, RoutingConfig(), budget)):
        own = manifest(arm=replace(FACTS, groups=routing.words if routing else "-"), settings={"batch_size": 3})
        own.write(tmp_path / str(number))
        assert Manifest.read(tmp_path / str(number)) == own


def test_a_part_of_a_set_is_partial():
    assert manifest(rows=2, expected_rows=9).partial
    assert not manifest(rows=9, expected_rows=9).partial
    assert not manifest().partial


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "holds no manifest.json"),
        ("{", "invalid JSON"),
        ('{"schema": 99}', "has schema 99"),
        ('{"schema": 1, "arm": {}}', "are missing"),
    ],
)
def test_broken_manifests_are_worded(tmp_path, content, message):
    if content is not None:
        (tmp_path / "manifest.json").write_text(content)
    refuses(message, Manifest.read, tmp_path)
