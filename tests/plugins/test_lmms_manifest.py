import importlib
import sys
import tomllib
from collections import namedtuple
from pathlib import Path
from types import ModuleType

import pytest

from subtoken_train.plugins.lmms_manifest import manifest

PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def test_the_entry_point_names_a_class_that_is_there(monkeypatch):
    registry = ModuleType("lmms_eval.models.registry_v2")
    registry.ModelManifest = namedtuple("StandIn", "model_id simple_class_path")
    for name, module in {
        "lmms_eval": ModuleType("lmms_eval"),
        "lmms_eval.models": ModuleType("lmms_eval.models"),
        registry.__name__: registry,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    written = tomllib.loads(PROJECT.read_text())["project"]["entry-points"]["lmms_eval.models"]["subtoken"]
    module, _, function = written.partition(":")
    made = getattr(importlib.import_module(module), function)()
    assert made.model_id == "subtoken"
    folder, _, name = made.simple_class_path.rpartition(".")
    source = PROJECT.parent / (folder.replace(".", "/") + ".py")
    assert f"class {name}(lmms)" in source.read_text()


def test_lmms_eval_itself_takes_it():
    registry_v2 = pytest.importorskip("lmms_eval.models.registry_v2")
    registry = registry_v2.ModelRegistryV2()
    registry.register_manifest(manifest())
    assert registry.get_model_class("subtoken").is_simple
