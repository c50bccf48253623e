"""Import paths that pages, recipes and methods of earlier versions name go on working, with a note."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from subtoken_train.errors import SubTokenWarning
from subtoken_train.moved import MOVED

SHOWN = {
    "subtoken_train.cli.quiet": "quiet_libraries",
    "subtoken_train.datasets.recall_datamodule": "RecallDataModule",
    "subtoken_train.evaluation.reporting.markdown": "report_markdown",
    "subtoken_train.evaluation.results.manifest": "Manifest",
    "subtoken_train.evaluation.results.store": "read_samples",
    "subtoken_train.evictions.layer_views": "LayerView",
    "subtoken_train.evictions.wrapper": "Wrapper",
    "subtoken_train.reducers.context": "ContextReducer",
    "subtoken_train.routing.linear": "fp32_linear",
    "subtoken_train.training.strategies.fsdp2": "Fsdp2Strategy",
}


@pytest.mark.parametrize("old", MOVED | SHOWN)
def test_an_old_path_is_the_new_module(old, monkeypatch):
    monkeypatch.delitem(sys.modules, old, raising=False)
    new = importlib.import_module(MOVED[old])
    spec = new.__spec__
    with pytest.warns(SubTokenWarning, match=f"{old} is now {MOVED[old]}; change the import"):
        assert importlib.import_module(old) is new
    assert new.__spec__ is spec
    assert new.__name__ == MOVED[old]
    assert callable(getattr(new, SHOWN[old]))


def test_a_name_that_never_was_is_still_refused():
    with pytest.raises(ModuleNotFoundError, match=r"subtoken_train\.evaluation\.results\.nothing"):
        importlib.import_module("subtoken_train.evaluation.results.nothing")


def test_an_import_of_the_package_alone_brings_no_library():
    code = "import sys, subtoken_train; print({'torch', 'transformers', 'yaml'} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert ran.stdout.strip() == "set()"
