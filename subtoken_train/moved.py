"""Keep import paths that pages, recipes and methods of earlier versions name: they import the new ones, with a note."""

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from subtoken_train.errors import SubTokenWarning

MOVED = {
    "subtoken_train.cli.quiet": "subtoken_train.cli.terminal",
    "subtoken_train.datasets.corpus_datamodule": "subtoken_train.datasets.datamodule",
    "subtoken_train.datasets.recall_datamodule": "subtoken_train.datasets.datamodule",
    "subtoken_train.datasets.scene_files": "subtoken_train.datasets.scenes",
    "subtoken_train.evaluation.reporting.markdown": "subtoken_train.evaluation.reporting.exports",
    "subtoken_train.evaluation.results.manifest": "subtoken_train.evaluation.results",
    "subtoken_train.evaluation.results.store": "subtoken_train.evaluation.results",
    "subtoken_train.evictions.asking_rows": "subtoken_train.evictions.queries",
    "subtoken_train.evictions.layer_views": "subtoken_train.view.view",
    "subtoken_train.evictions.wrapper": "subtoken_train.evictions.base",
    "subtoken_train.reducers.context": "subtoken_train.reducers.base",
    "subtoken_train.reducers.controls": "subtoken_train.reducers.embeds",
    "subtoken_train.reducers.diversity": "subtoken_train.reducers.embeds",
    "subtoken_train.reducers.scored_context": "subtoken_train.reducers.contexts",
    "subtoken_train.reducers.video": "subtoken_train.reducers.embeds",
    "subtoken_train.routing.controls": "subtoken_train.routing.routers",
    "subtoken_train.routing.linear": "subtoken_train.routing.routers",
    "subtoken_train.routing.output_norm": "subtoken_train.routing.routers",
    "subtoken_train.routing.state": "subtoken_train.routing.bank",
    "subtoken_train.training.adapter_parts": "subtoken_train.training.module",
    "subtoken_train.training.distillation": "subtoken_train.training.loss",
    "subtoken_train.training.strategies.fsdp2": "subtoken_train.training.strategies",
    "subtoken_train.training.strategies.zero": "subtoken_train.training.strategies",
}


def new_path(name: str) -> str | None:
    """Return the module that an old name is now (for a method's own: its class's); None: no old name."""
    room, _, method = name.rpartition(".")
    if room in ("subtoken_train.evictions", "subtoken_train.reducers"):
        tables = [each.builtin for each in vars(sys.modules[room]).values() if getattr(each, "package", "") == room]
        found = [f"{room}.{table[method].partition(':')[0]}" for table in tables if method in table]
        if found and found[0] != name:
            return found[0]
    return MOVED.get(name)


class MovedModules(MetaPathFinder, Loader):
    """Find the modules that ``new_path`` names after all other finders have failed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for an old name, None for any other."""
        return None if new_path(fullname) is None else ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module in its new place, and say where that is."""
        new = str(new_path(spec.name))
        warnings.warn(f"{spec.name} is now {new}; change the import", SubTokenWarning, stacklevel=2)
        module = importlib.import_module(new)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back, which the import of the old name has replaced; it ran already."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def keep_moved_modules() -> None:
    """Let the old names be imported in this process."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(MovedModules())
