"""The pool of valid originals, made once in a process."""

import faulthandler
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.hostile.pool import make_pool


@pytest.fixture(scope="session")
def pool(tmp_path_factory) -> Path:
    torch.set_num_threads(1)
    return make_pool(tmp_path_factory.mktemp("pool"))


@pytest.fixture(autouse=True)
def no_endless_wait() -> Iterator[None]:
    faulthandler.dump_traceback_later(300, exit=True, file=sys.__stderr__)
    yield
    faulthandler.cancel_dump_traceback_later()
