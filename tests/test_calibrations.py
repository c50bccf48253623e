"""The calibration file: written whole, read strictly; every fault is one message that names the file."""

import json
import os
from pathlib import Path

import pytest

from subtoken_train.calibrations import MAX_CALIBRATION, CalibrationData, read_calibration
from subtoken_train.evictions import build_eviction
from subtoken_train.evictions.duo_attention import HeadAlphas
from subtoken_train.evictions.h2o import LayerShares
from subtoken_train.evictions.snapkv import HeadScores
from subtoken_train.families.family import shapes_digest
from subtoken_train.inference.compression import Compression, method_record
from subtoken_train.types import Identity
from tests.support.prompt_views import NOBODY, written
from tests.support.refusals import refuses
from tests.support.text_families import text_family

ALPHAS = HeadAlphas([[0.0, 1.0], [0.25, 0.5]], sinks=4, recent=8)
SHARES = LayerShares([0.25, 0.5], [[0.2, 0.3], [0.4, 0.6]])


@pytest.fixture
def path(tmp_path):
    return written(tmp_path / "duo.json", "duo_attention", ALPHAS, learning_rate=0.02)


def changed(path, change):
    """The file after ``change`` was done to its content."""
    content = json.loads(Path(path).read_text())
    change(content)
    Path(path).write_text(json.dumps(content))
    return path


def test_what_was_written_is_read(path, tmp_path):
    found = read_calibration(path, "duo_attention", HeadAlphas)
    assert found.numbers == ALPHAS
    assert (found.method, found.backbone, found.settings) == ("duo_attention", NOBODY, {"learning_rate": 0.02})
    assert found.data == CalibrationData("tests", 1, 2)
    other = read_calibration(written(tmp_path / "other.json", "prefixkv", SHARES), "prefixkv", LayerShares)
    assert other.numbers == SHARES
    assert len(other.digest) == 64 != found.digest
    assert sorted(file.name for file in tmp_path.iterdir()) == ["duo.json", "other.json"]  # nothing half written


CHANGES = {
    "another method's": (lambda c: c.update(method="prefixkv"), "calibration of 'prefixkv', not of duo_attention"),
    "newer": (lambda c: c.update(schema_version=2), "schema 2; this version reads 1"),
    "no numbers": (lambda c: c.pop("numbers"), "numbers is missing"),
    "another key": (lambda c: c.update(more=1), "unknown key 'more'"),
    "another number": (lambda c: c["numbers"].update(beta=1), "numbers: unknown key 'beta'"),
    "too large": (lambda c: c["numbers"]["alpha"][1].__setitem__(0, 1.5), r"alpha\[1\]\[0\] is 1.5; it must be in"),
    "ragged": (lambda c: c["numbers"]["alpha"][0].append(1), "must be a table"),
    "empty rows": (lambda c: c["numbers"].update(alpha=[[], []]), "must be a table"),
    "no recent": (lambda c: c["numbers"].update(recent=0), "recent is 0; it must be 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_file_is_refused_in_one_message(path, name):
    change, words = CHANGES[name]
    assert "duo.json" in refuses(words, build_eviction, "duo_attention", calibration=changed(path, change))


def test_what_is_no_calibration_is_refused(tmp_path):
    file = tmp_path / "duo.json"
    infinity = (b'{"schema_version": 1e999}', "schema_version is inf")
    for content, words in ((b"{", "invalid JSON"), (b"[]", "it must be a group of keys"), infinity):
        file.write_bytes(content)
        refuses(words, build_eviction, "duo_attention", calibration=str(file))
    with file.open("wb") as opened:
        opened.truncate(MAX_CALIBRATION + 1)
    refuses("at most", build_eviction, "duo_attention", calibration=str(file))
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", tmp_path, tmp_path / "missing.json"):
        with pytest.raises(ValueError, match="is not a file; 'subtoken-train calibrate prefixkv' writes one"):
            build_eviction("prefixkv", calibration=str(place))
    for value in (5, True, ["a"], {"a": 1}, "", "a\0b"):
        refuses("it must name a file", build_eviction, "prefixkv", calibration=value)


def test_shares_that_make_no_table():
    for keep, shares, words in (
        ([0.5], [[0.5], [0.6]], "a row for each"), ([0.5, 0.5], [[0.5], [0.6]], "keep must rise"),
        ([0.0], [[0.5]], "keep must rise"), ([1.0], [[0.5]], "keep must rise"),
        ([0.5], [[1.5]], r"shares\[0\]\[0\] is 1.5"),
    ):  # fmt: skip
        refuses(words, LayerShares, keep, shares)


def test_numbers_of_another_shape(path):
    found = read_calibration(path, "duo_attention", HeadAlphas)
    found.check_backbone(NOBODY.model_type, NOBODY.digest, 2, 2, 8)
    with pytest.raises(ValueError, match="alpha has 2 layers of 2 heads, and the backbone 2 of 4"):
        found.check_backbone(NOBODY.model_type, NOBODY.digest, 2, 4, 8)
    for other in ((NOBODY.model_type, "1" * 64), ("mistral", NOBODY.digest)):
        with pytest.raises(ValueError, match=r"was made on 'nowhere/model'.*make its own: subtoken-train calibrate d"):
            found.check_backbone(*other, 2, 2, 8)
    refuses("shares has 2 layers, and the backbone 3", SHARES.check_shape, 3, 2, 8)


def test_a_wrapper_hands_on_what_its_method_reads(path):
    assert build_eviction("ada(duo_attention)", calibration=path).calibrated.numbers == ALPHAS
    assert build_eviction("ada(snapkv)").calibrated is None


def test_learned_budgets_are_checked_beside_what_their_method_reads(path, tmp_path):
    """Both files are of the backbone, or the one that is not is named; records tell both."""
    family = text_family(layers=2)
    made_on = Identity("random", None, str(family.model.config.model_type), shapes_digest(family))
    numbers = HeadScores([[1.0] * family.shape.num_kv_heads] * 2)
    budgets = written(tmp_path / "lkv.json", "lkv", numbers, made_on)
    method = build_eviction("lkv(duo_attention)", **{"lkv.calibration": budgets, "duo_attention.calibration": path})
    record = method_record(method)
    assert record["calibration"] == method.calibrated.digest != record["base"]["calibration"]
    refuses("the calibration of duo_attention was made on 'nowhere/model'", Compression(method, 0.5).check, family)
    Compression(build_eviction("lkv(knorm)", calibration=budgets), 0.5).check(family)
    for notation, name in {"lkv(knorm)": "lkv", "headkv": "headkv", "kvzap": "kvzap"}.items():
        refuses(f"'subtoken-train calibrate {name}' writes one", build_eviction(notation).check_shape, 2, 2, 8)
    refuses("lkv divides a budget between heads, and tova keeps one set", build_eviction, "lkv(tova)")
