"""One declaration per setting: flags, grids, harnesses and Python keywords agree with it."""

from argparse import ArgumentParser
from dataclasses import fields

import pytest
from mypy import api

from subtoken_train.cli.command_line import spelled_flag
from subtoken_train.cli.evaluate import add_arguments
from subtoken_train.evaluation.runner.spec import AXES
from subtoken_train.inference.arm_spec import ArmSpec
from subtoken_train.inference.compression import CompressionSettings
from subtoken_train.plugins.harness import MODEL_SETTINGS, ModelArguments, read_arguments
from subtoken_train.settings import ARM_SETTINGS, FLAGGED, KINDS
from tests.support.places import ROOT
from tests.support.refusals import refuses


def test_every_setting_is_declared_with_its_kind():
    assert list(ARM_SETTINGS) == [field.name for field in fields(ArmSpec) if field.name != "written"]
    assert list(MODEL_SETTINGS) == [field.name for field in fields(ModelArguments) if field.name != "written"]
    assert {name: setting.kind for name, setting in ARM_SETTINGS.items() if setting.kind is not str} == {
        "rerotate": bool, **dict.fromkeys(("reducer_options", "eviction_options"), dict),
        **dict.fromkeys(("keep_ratio", "byte_share", "key_channels"), float),
        **dict.fromkeys(("eviction_every", "prefill_chunk", "max_pixels", "seed"), int),
    }  # fmt: skip
    assert {setting.kind for setting in ARM_SETTINGS.values()} == set(KINDS)


def test_flags_and_axes_are_the_declared_ones():
    parser = ArgumentParser()
    add_arguments(parser)
    assert {spelled_flag(name) for name in FLAGGED} <= set(parser._option_string_actions)
    assert not {"--name", "--seed", "--reducer-option"} & set(parser._option_string_actions)
    assert set(ARM_SETTINGS) - set(AXES) == {"name", "reducer_options", "eviction_options"}
    assert "%%" not in parser.format_help()


def test_python_keywords_are_settings_too():
    assert CompressionSettings.__optional_keys__ < set(ARM_SETTINGS)


@pytest.mark.parametrize(("given", "read"), [("3136", 3136), (3136, 3136)])
def test_a_harness_may_cap_images(given, read):
    assert read_arguments({"backbone": "x", "max_pixels": given}).max_pixels == read
    refuses("max_pixels is 'few'; it must be a whole number", read_arguments, {"backbone": "x", "max_pixels": "few"})


RIGHT = """
from subtoken_train import KVBudget, SubTokenModel

model = SubTokenModel.from_pretrained("a", eviction="kvzip", eviction_keep=0.42, kv_dtype="int8", groups=(16, 12))
answers: list[str] = model.ask("text", ["question"], max_new_tokens=8)
share: float = KVBudget(keep_ratio=0.25, num_groups=16, kept_groups=4).total_kv_fraction
"""
WRONG = """
from subtoken_train import SubTokenModel, SubTokenModle

SubTokenModel.from_pretrained("a", evictoin="kvzip")
SubTokenModel.from_pretrained("a", kv_dtype="int7")
SubTokenModel(None, None, eviction_kep=0.5)
"""


def test_the_package_says_that_it_is_typed():
    assert (ROOT / "subtoken_train/py.typed").read_bytes() == b""


@pytest.mark.slow
def test_misspelt_keywords_words_and_names_are_found(tmp_path, monkeypatch):
    """With the project's own settings, whose cache the linter has filled."""
    monkeypatch.chdir(ROOT)

    def said(text):
        path = tmp_path / "program.py"
        path.write_text(text)
        out, err, code = api.run(["--config-file", "pyproject.toml", "--no-error-summary", str(path)])
        assert err == ""
        return code, out

    assert said(RIGHT) == (0, "")
    code, out = said(WRONG)
    assert code == 1
    assert 'Module "subtoken_train" has no attribute "SubTokenModle"; maybe "SubTokenModel"?' in out
    words = 'Unexpected keyword argument "evictoin" for "from_pretrained" of "SubTokenModel"; did you mean "eviction"?'
    assert words in out
    assert "has incompatible type \"Literal['int7']\"" in out
    assert 'Unexpected keyword argument "eviction_kep" for "SubTokenModel"; did you mean "eviction_keep"?' in out
    assert out.count("error:") == 4
