"""Shared fixtures: random tiny models of the real classes, a folder for each test; what a user has stays unseen."""

import os
import shutil
import site
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

REPOSITORY = Path(__file__).resolve().parents[1]
SETTINGS = ("COMET_", "HF_", "HUGGING", "MLFLOW_", "MPL", "SLURM_", "SUBTOKEN_", "TRANSFORMERS_", "WANDB_", "XDG_")
"""Beginnings of environment variables by which a user's libraries, jobs and kernels are set."""

settings.register_profile("tests", max_examples=50, deadline=None)
settings.load_profile("tests")

FIRST = not Path.home().name.startswith("subtoken-tests-")
"""Whether no test run has started this one: a worker, or a suite within a test, has the home of the run around it."""

if FIRST:
    paths = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    packages = {"PYTHONPATH": paths, "PYTHONUSERBASE": site.getuserbase()}
    for name in [name for name in os.environ if name.startswith(SETTINGS)]:
        del os.environ[name]
    os.environ |= {"HOME": tempfile.mkdtemp(prefix="subtoken-tests-"), "HF_HUB_OFFLINE": "1", **packages}


def pytest_collection_finish() -> None:
    """Leave the checkout before the first fixture; Lightning's logger keeps the stderr of its import: the run's own."""
    import lightning.pytorch  # noqa: F401

    os.chdir(os.environ["HOME"])


def pytest_unconfigure() -> None:
    if FIRST:
        os.chdir(REPOSITORY)
        shutil.rmtree(os.environ["HOME"], ignore_errors=True)


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session", autouse=True)
def hypothesis_has_drawn(request):
    """Let Hypothesis make its tables before any test: in a fresh clone it would call the first that draws too slow."""
    if not any(getattr(getattr(item, "obj", None), "is_hypothesis_test", False) for item in request.session.items):
        return
    from hypothesis import HealthCheck, given
    from hypothesis import strategies as st

    # one draw in twenty asks for a constant, and the first example asks for none
    @settings(max_examples=3, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.text(), st.lists(st.integers(), min_size=200, max_size=200))
    def draw(text: str, numbers: list[int]) -> None:
        """Nothing is asked of them."""

    draw()


@pytest.fixture
def shared() -> Path:
    """Reference material of the original implementations; not part of the project."""
    folder = REPOSITORY.parent / "shared"
    if not folder.is_dir():
        pytest.skip("reference material (../shared) is absent")
    return folder


@pytest.fixture
def tiny_family():
    """A LlavaFamily over a randomly initialised tiny LLaVA (64 visual tokens, 4 layers)."""
    from tests.support.helpers import drawn_llava

    return drawn_llava(4)


@pytest.fixture(scope="session")
def vlm_adapter(tmp_path_factory) -> Path:
    """An adapter folder over a random tiny LLaVA, see ``helpers``."""
    from tests.support.helpers import write_vlm_adapter

    return write_vlm_adapter(tmp_path_factory.mktemp("vlm"))


@pytest.fixture(scope="session")
def text_adapter(tmp_path_factory) -> Path:
    """An adapter folder over a random tiny Llama, see ``helpers``."""
    from tests.support.helpers import write_text_adapter

    return write_text_adapter(tmp_path_factory.mktemp("text"))


@pytest.fixture
def dummy_evictions(monkeypatch):
    """Registers the eviction methods ``first`` and ``first_visual``."""
    from subtoken_train.evictions import EVICTIONS
    from tests.support.helpers import FirstEntries, FirstVisual

    for method in (FirstEntries, FirstVisual):
        monkeypatch.setitem(EVICTIONS, method.name, method)
