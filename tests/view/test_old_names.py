"""Methods that were written for version 0.2 import views and scores by other names."""

import sys

import pytest

from subtoken_train.errors import SubTokenWarning
from subtoken_train.evictions import base
from subtoken_train.view import view
from subtoken_train.view.scores import Candidates, Scores


def test_they_are_the_same_classes(monkeypatch):
    monkeypatch.delitem(sys.modules, "subtoken_train.evictions.layer_views", raising=False)
    with pytest.warns(SubTokenWarning, match=r"evictions\.layer_views is now subtoken_train\.view\.view"):
        from subtoken_train.evictions.layer_views import LayerView, Need, Scope, TaskView
    assert (LayerView, TaskView) == (view.View, view.TaskView)
    assert (Need, Scope) == (view.Need, view.Scope)
    assert base.LayerScores is Scores
    assert base.Candidates is Candidates
