"""Quest in every step, as an eviction: everything stays, layers that read pages, settings."""

import pytest

from subtoken_train.evictions.basic import QuestSteps
from subtoken_train.inference.compression import Compression
from tests.support.prompt_views import PROMPTS, layer_views, plan


@pytest.mark.parametrize("keep", [0.1, 1.0])
def test_nothing_is_evicted(keep):
    method = QuestSteps()
    views = layer_views(list(PROMPTS.values()), method.needs, "left", dropped=[(1, 0.5)])
    for view, kept in zip(views, plan(method, views, keep)[2], strict=True):
        assert kept.shape[1] == 1
        assert (kept[:, 0] == view.entries_BN).all()


def test_the_first_layers_read_everything():
    assert [QuestSteps().pages(layer) for layer in range(4)] == [None, None, (16, 3), (16, 3)]
    assert QuestSteps(page_size=8, least_pages=1, dense_layers=0).pages(0) == (8, 1)


def test_tables_say_that_it_reads():
    assert Compression(QuestSteps(), 0.25).label == "quest_steps reads 0.25"
    assert Compression(QuestSteps(), 512, "tokens", "all").label == "quest_steps reads 512 tokens all"
