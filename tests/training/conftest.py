"""A tiny run: random backbone on disk, a handful of scenes, settings that train in seconds."""

import pytest

from tests.support.training_memory import tiny_fit


@pytest.fixture
def tiny_run(tmp_path, tiny_family):
    """A function from extra arguments to the argv of a short fit under ``tmp_path``."""
    return tiny_fit(tmp_path, tiny_family)
