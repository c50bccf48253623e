"""All tasks of these reports are fake ones, but RULER and LongBench."""

import pytest

from subtoken_train.evaluation.reporting.score_tables import PAPER_TASKS
from tests.support.report_results import register


@pytest.fixture(autouse=True, scope="module")
def tasks():
    with pytest.MonkeyPatch.context() as monkeypatch:
        register(monkeypatch, *PAPER_TASKS, "mmlu", "ruler_4k", "other", "fake")
        yield
