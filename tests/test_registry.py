"""Names that lead to code: built in, of other packages, and import paths of earlier versions."""

import importlib
import shutil
import sys

import pytest

from subtoken_train.errors import SubTokenWarning
from subtoken_train.evaluation.tasks import TASKS
from subtoken_train.evictions import EVICTIONS, WRAPPERS
from subtoken_train.families import FAMILIES
from subtoken_train.moved import MOVED
from subtoken_train.registry import Registry
from subtoken_train.routing import SELECTORS
from subtoken_train.training.loss import LOSSES
from tests.support.refusals import refuses

REGISTRIES = {registry.group: registry for registry in (EVICTIONS, WRAPPERS, FAMILIES, SELECTORS, LOSSES, TASKS)}
CLASSES = """
from subtoken_train.evictions.keys import KNorm

class Newest(KNorm):
    name = "newest"

class Unnamed(KNorm):
    pass
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Puts a package with entry points of evictions on the path; returns a registry that has not looked yet."""
    monkeypatch.syspath_prepend(tmp_path)

    def installed(entries: str, code: str = CLASSES, package: str = "more_methods") -> Registry:
        monkeypatch.delitem(sys.modules, package, raising=False)
        (tmp_path / f"{package}.py").write_text(code)
        metadata = tmp_path / f"{package}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[subtoken_train.evictions]\n{entries}\n")
        room, builtin = "subtoken_train.evictions", {"h2o": "h2o:H2O"}
        return Registry("eviction method", group=room, package=room, base="base:Eviction", builtin=builtin, named=True)

    return installed


def test_a_package_in_an_archive_is_found(install, tmp_path, monkeypatch):
    registry = install("newest = more_methods:Newest")
    archive = shutil.make_archive(str(tmp_path / "packed"), "zip", tmp_path)
    monkeypatch.setattr(sys, "path", [archive, *(place for place in sys.path if place != str(tmp_path))])
    assert list(registry) == ["h2o", "newest"]


@pytest.mark.parametrize(("group", "name"), [(group, name) for group in REGISTRIES for name in REGISTRIES[group]])
def test_every_built_in_is_there_under_its_name(group, name):
    registry = REGISTRIES[group]
    found = registry.find(name)
    assert issubclass(found, registry._own(registry._base))
    assert not registry._named or found.name == name


def test_another_package_adds_a_name_and_is_imported_when_it_is_asked_for(install):
    registry = install("newest = more_methods:Newest")
    assert (list(registry), len(registry), "newest" in registry) == (["h2o", "newest"], 2, True)
    refuses(r"unknown eviction method 'newst'. Did you mean 'newest'\? Allowed: h2o, new", registry.find, "newst")
    assert "more_methods" not in sys.modules
    assert registry.find("newest").__module__ == "more_methods"
    assert registry.origin("newest") == "more_methods==1.0"
    assert registry.origin("h2o") is registry.origin("newst") is None


def test_a_built_in_goes_before_another_packages(install):
    registry = install("h2o = more_methods:Newest")
    with pytest.warns(SubTokenWarning, match=r"'h2o' of package more_methods \(more_methods:Newest\) is not used"):
        assert list(registry) == ["h2o"]
    assert registry["h2o"].__module__ == "subtoken_train.evictions.h2o"


@pytest.mark.parametrize(
    ("entry", "code", "message"),
    [
        ("newest = more_methods:Newest", "import no_such_module", r"cannot be imported \(ModuleNotFoundError: No mod"),
        ("newest = more_methods:Newest", "def broken(:", r"cannot be imported \(SyntaxError"),
        ("newest = more_methods:Absent", CLASSES, r"cannot be imported \(AttributeError"),
        ("newest = json:dumps", CLASSES, r"\(json:dumps\) does not extend .*Eviction with all its methods"),
        ("newest = subtoken_train.evictions.base:Eviction", CLASSES, "does not extend .*Eviction with all its methods"),
        ("newest = more_methods:Unnamed", CLASSES, "calls itself 'knorm'; the two names must be the same"),
    ],
)
def test_a_package_at_fault_is_named(install, entry, code, message):
    refuses(f"eviction method 'newest' of package more_methods.*{message}", install(entry, code).find, "newest")


def test_two_packages_with_one_name_are_refused(install):
    install("newest = more_methods:Newest")
    registry = install("newest = even_more:Newest", package="even_more")
    assert list(registry) == ["h2o", "newest"]
    refuses(r"of package .* and package .*: the name is taken twice", registry.find, "newest")


@pytest.mark.parametrize("name", ["os:system", "more_methods:Newest", "subtoken_train.evictions.h2o:H2O", ""])
def test_a_name_never_imports_what_it_spells(install, name):
    refuses("unknown eviction method", install("newest = more_methods:Newest").find, name)
    assert "more_methods" not in sys.modules


SHOWN = {
    "subtoken_train.cli.quiet": "quiet_libraries", "subtoken_train.datasets.recall_datamodule": "RecallDataModule",
    "subtoken_train.evaluation.reporting.markdown": "report_markdown",
    "subtoken_train.evaluation.results.manifest": "Manifest", "subtoken_train.evaluation.results.store": "read_samples",
    "subtoken_train.evictions.layer_views": "LayerView", "subtoken_train.evictions.wrapper": "Wrapper",
    "subtoken_train.reducers.context": "ContextReducer", "subtoken_train.routing.linear": "fp32_linear",
    "subtoken_train.routing.output_norm": "OutputNormSelector", "subtoken_train.routing.state": "RoutingState",
    "subtoken_train.training.adapter_parts": "adapter_config",
    "subtoken_train.training.distillation": "DistillationConfig",
    "subtoken_train.training.strategies.fsdp2": "Fsdp2Strategy",
    "subtoken_train.training.strategies.zero": "ZeroStrategy",
}  # fmt: skip


@pytest.mark.parametrize("old", MOVED | SHOWN)
def test_an_old_path_is_the_new_module(old, monkeypatch):
    monkeypatch.delitem(sys.modules, old, raising=False)
    new = importlib.import_module(MOVED[old])
    spec = new.__spec__
    with pytest.warns(SubTokenWarning, match=f"{old} is now {MOVED[old]}; change the import"):
        assert importlib.import_module(old) is new
    assert new.__spec__ is spec
    assert new.__name__ == MOVED[old]
    assert callable(getattr(new, SHOWN.get(old, "__getattribute__")))


METHODS = {"evictions.knorm": "KNorm", "evictions.ada": "Ada", "reducers.evs": "EVS"}


@pytest.mark.parametrize("old", METHODS)
def test_a_method_s_own_module_of_earlier_versions_is_that_of_its_class(old, monkeypatch):
    monkeypatch.delitem(sys.modules, f"subtoken_train.{old}", raising=False)
    with pytest.warns(SubTokenWarning, match=rf"{old} is now subtoken_train\.\w+\.\w+; change the import"):
        module = importlib.import_module(f"subtoken_train.{old}")
    assert callable(getattr(module, METHODS[old]))
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("subtoken_train.reducers.snapkv")


def test_a_name_that_never_was_is_still_refused():
    with pytest.raises(ModuleNotFoundError, match=r"subtoken_train\.evaluation\.results\.nothing"):
        importlib.import_module("subtoken_train.evaluation.results.nothing")
