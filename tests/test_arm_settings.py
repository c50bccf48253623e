"""One declaration per setting: flags, grids, harnesses and Python keywords agree with it."""

from argparse import ArgumentParser
from dataclasses import fields

import pytest

from subtoken_train.cli.command_line import spelled_flag
from subtoken_train.cli.evaluate import add_arguments
from subtoken_train.evaluation.runner.spec import AXES
from subtoken_train.inference.arm_spec import ArmSpec
from subtoken_train.inference.compression import CompressionSettings
from subtoken_train.plugins.harness import MODEL_SETTINGS, ModelArguments, read_arguments
from subtoken_train.settings import ARM_SETTINGS, FLAGGED, KINDS


def test_every_setting_is_declared_with_its_kind():
    assert list(ARM_SETTINGS) == [field.name for field in fields(ArmSpec) if field.name != "written"]
    assert list(MODEL_SETTINGS) == [field.name for field in fields(ModelArguments) if field.name != "written"]
    kinds = {name: setting.kind for name, setting in ARM_SETTINGS.items() if setting.kind is not str}
    assert kinds == {
        "keep_ratio": float, "key_channels": float, "rerotate": bool, "reducer_options": dict, "eviction_options": dict,
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
    own = CompressionSettings.__optional_keys__ - {"eviction_unit"}
    assert own < set(ARM_SETTINGS)


@pytest.mark.parametrize(("given", "read"), [("3136", 3136), (3136, 3136)])
def test_a_harness_may_cap_images(given, read):
    assert read_arguments({"backbone": "x", "max_pixels": given}).max_pixels == read
    with pytest.raises(ValueError, match="max_pixels is 'few'; it must be a whole number"):
        read_arguments({"backbone": "x", "max_pixels": "few"})
