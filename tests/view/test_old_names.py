"""Methods that were written for version 0.2 import views and scores by other names."""

from subtoken_train.evictions import base, layer_views
from subtoken_train.view.scores import Candidates, Scores
from subtoken_train.view.view import View


def test_they_are_the_same_classes():
    assert layer_views.LayerView is View
    assert base.LayerScores is Scores
    assert base.Candidates is Candidates
