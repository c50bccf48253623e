"""The pool of valid originals, made once in a process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hostile.pool import make_pool


@pytest.fixture(scope="session")
def pool(tmp_path_factory) -> Path:
    """See ``hostile.pool``."""
    torch.set_num_threads(1)
    return make_pool(tmp_path_factory.mktemp("pool"))
