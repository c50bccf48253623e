"""What all wrappers take from their base."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from subtoken_train.evictions import WRAPPERS, build_eviction
from subtoken_train.evictions.base import Eviction, Wrapper
from subtoken_train.evictions.kvcompose import KVCompose
from subtoken_train.view.scores import Candidates
from tests.support.prompt_views import LAYERS, PROMPTS, WITH_IMAGE, layer_views
from tests.support.truth_models import OwnSets

SHARES = {"per_layer": {"shares": [1] * LAYERS}}


def around(name, base):
    return WRAPPERS[name](base, **SHARES.get(name, {}))


@pytest.mark.parametrize("name", WRAPPERS)
def test_what_a_method_says_of_itself_is_passed_on(name):
    for task in ("aware", "agnostic"):
        base = KVCompose(task=task)
        wrapper = around(name, base)
        assert wrapper.name == f"{name}(kvcompose)"
        assert type(wrapper).name == name
        assert wrapper.needs >= base.needs
        assert wrapper.reads_question == base.reads_question
        regions = torch.tensor([PROMPTS["image last"]])
        assert torch.equal(wrapper.second_pass(regions), base.second_pass(regions))
        assert wrapper.inside == (base,)
    assert not around(name, build_eviction("knorm")).needs_image
    assert around("per_layer", build_eviction("aircache")).needs_image
    assert around("per_layer", build_eviction("aircache")).reads_question
    assert around("per_layer", build_eviction("aircache")).heads_share


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_method_that_says_itself_what_stays_is_refused(name):
    with pytest.raises(ValueError, match=f"own_sets says itself what stays, so {name} cannot be put around it"):
        around(name, OwnSets())
    with pytest.raises(ValueError, match=f"quest_steps keeps every entry and reads some, so {name} has nothing"):
        around(name, build_eviction("quest_steps"))


def test_nothing_of_a_base_is_forgotten():
    """Whatever a method says of itself is passed on or said anew, but for what is refused.

    That is: own ways to keep or read, and a wrapper as a context reducer, whose settings ``evenly`` says.
    """
    public = {key for key in vars(Eviction) if not key.startswith("_")} - {"keep", "reads", "pages", "evenly"}
    assert public <= {*vars(Wrapper), *vars(around("ada", build_eviction("knorm")))}


def test_one_wrapper_in_another():
    built = build_eviction("per_layer(ada(critical(knorm)))", shares=[1, 1])
    assert [type(each).name for each in built.inside] == ["ada", "critical", "knorm"]
    assert built.heads_differ
    assert not built.base.base.heads_differ
    assert built.needs == {"key_norms", "values"}


@dataclass(frozen=True)
class Reversed(Wrapper):
    """A wrapper of another package: what its base would drop first stays."""

    name: ClassVar[str] = "reversed"

    def score(self, view):
        found = self.base.score(view)
        found.scores_BhN = -found.scores_BhN
        return found


def test_a_wrapper_of_another_package(monkeypatch):
    monkeypatch.setitem(WRAPPERS, "reversed", Reversed)
    views = layer_views(list(WITH_IMAGE.values()), frozenset({"key_norms"}))
    entries = [view.entries_BN for view in views]
    budget = torch.stack([each.sum(-1) for each in entries])
    kept = {}
    for name, count in (("knorm", budget // 4), ("ada(reversed(knorm))", budget - budget // 4)):
        method: Eviction = build_eviction(name, **({"alpha": 1.0} if "ada" in name else {}))
        scores = [method.score(view) for view in views]
        kept[name] = method.keep(scores, Candidates([view.regions_BN for view in views], entries, count))
    for view, few, many in zip(views, *kept.values(), strict=True):
        assert torch.equal(few ^ many, view.entries_BN[:, None].expand_as(few))
