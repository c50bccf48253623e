"""Methods that were written for earlier versions import views and scores by other names."""

import sys

import pytest
import torch

from subtoken_train.errors import SubTokenWarning
from subtoken_train.evictions import base
from subtoken_train.reducers.base import ReducerView
from subtoken_train.routing import SelectorInput
from subtoken_train.view import view
from subtoken_train.view.scores import Candidates, Scores


def test_they_are_the_same_classes(monkeypatch):
    monkeypatch.delitem(sys.modules, "subtoken_train.evictions.layer_views", raising=False)
    with pytest.warns(SubTokenWarning, match=r"evictions\.layer_views is now subtoken_train\.view\.view"):
        from subtoken_train.evictions.layer_views import LayerView, Need, Scope, TaskView
    assert {LayerView, TaskView, ReducerView, SelectorInput} == {view.View}
    assert (Need, Scope) == (view.Need, view.Scope)
    assert base.LayerScores is Scores
    assert base.Candidates is Candidates


def test_what_a_place_lacks_or_is_called_otherwise_now_is_said():
    given = view.View(layer=3, hidden_BND=torch.zeros(1, 2, 4))
    for name, error, words in (
        ("embeds_BND", AttributeError, "embeds_BND of a view is now hidden_BND"),
        ("nothing", AttributeError, "a view has no nothing"),
        ("asks_BN", ValueError, "did not ask for it: add 'asks'"),
        ("query_summary_BD", ValueError, "there is none: set query_conditioned = True"),
        ("scout", ValueError, "there is none: this place of the pass has layer, .*hidden_BND"),
    ):
        with pytest.raises(error, match=words):
            getattr(given, name)
    assert given.replaced(layer=1).layer == 1
