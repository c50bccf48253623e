"""Evictions as they are written: names, settings, and what is said of mistakes."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subtoken_train.evictions import (
    DEEPEST,
    EVICTIONS,
    WRAPPERS,
    build_eviction,
    innermost,
    notation_names,
    setting_fields,
)
from subtoken_train.evictions.snapkv import SnapKV
from subtoken_train.evictions.wrappers import Ada, CriticalKV


def test_wrappers_stand_in_each_other_and_settings_find_their_method():
    built = build_eviction("ada(critical(snapkv))", alpha=0.5, epsilon=0.01, window=3, **{"snapkv.kernel": 3})
    assert built == Ada(CriticalKV(SnapKV(window=3, kernel=3), epsilon=0.01), alpha=0.5)
    assert built.name == "ada(critical(snapkv))"
    assert hash(built) == hash(build_eviction("ada(critical(snapkv))", alpha=0.5, epsilon=0.01, window=3, kernel=3))
    assert innermost("ada(critical(snapkv))") == "snapkv"
    assert innermost("snapkv") == "snapkv"


@pytest.mark.parametrize(
    ("notation", "words"),
    [
        (
            "ada(snapkv",
            r"'ada\(snapkv' has unbalanced parentheses: 1 \"\(\" and 0 \"\)\"; write a method, or "
            r"wrappers around one: ada\(",
        ),
        ("ada(critical(snapkv)))", r"has unbalanced parentheses: 2 \"\(\" and 3 \"\)\""),
        ("ada(snapkv)x", "cannot be read"),
        (")ada(", "cannot be read"),
        ("ada()", "parentheses without a name"),
        ("(snapkv)", "parentheses without a name"),
        ("ada(ada(snapkv))", "has 'ada' twice"),
        ("ada(snapvk)", r"unknown eviction method 'snapvk'\. Did you mean 'snapkv'\?"),
        ("adda(snapkv)", r"unknown eviction wrapper 'adda'\. Did you mean 'ada'\? Allowed: ada, .*per_layer"),
        ("adda", r"unknown eviction method 'adda'\. Did you mean 'ada'"),
        ("ada", r"'ada': ada goes around a method; write ada\(snapkv\)"),
        ("chunk(ada)", r"ada goes around a method; write ada\(snapkv\)"),
        ("knorm(snapkv)", r"knorm goes around no other method; wrappers: ada, "),
        ("ada(knorm,snapkv)", "unknown eviction method 'knorm,snapkv'"),
        (5, "eviction 5 must be text; write a method"),
        ("ada(" * 10**6 + "snapkv" + ")" * 10**6, f"has 1,000,001 methods inside each other; at most {DEEPEST}"),
        ("knorm(" + "x" * 10**6 + ")", "knorm goes around no other"),
        ("x" * 10**6, "unknown eviction method"),
    ],
)
def test_mistakes_are_worded_shortly(notation, words):
    with pytest.raises(ValueError, match=words) as raised:
        build_eviction(notation)
    assert len(str(raised.value)) < 450


@given(st.text(alphabet="()ab", max_size=12))
def test_any_text_is_read_or_refused_in_words(text):
    try:
        names = notation_names(text)
    except ValueError:
        return
    assert "(".join(names) + ")" * (len(names) - 1) == text
    assert len(set(names)) == len(names)


@dataclass(frozen=True)
class Both(SnapKV):
    """A method with a setting that a wrapper has, too."""

    name: ClassVar[str] = "both"
    epsilon: float = 0.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"windo": 3}, r"unknown setting of critical\(both\) 'windo'\. Did you mean 'window'"),
        ({"base": 1}, "unknown setting of .* 'base'"),
        ({"critical.base": 1}, "unknown setting of critical 'base'"),
        ({"bth.window": 3}, r"unknown method of critical\(both\) 'bth'\. Did you mean 'both'"),
        ({"both.windo": 3}, r"unknown setting of both 'windo'\. Did you mean 'window'"),
        ({"epsilon": 0.1}, "several methods of .* have the setting 'epsilon'; write critical.epsilon or both.epsilon"),
        ({"window": 3, "both.window": 3}, "setting 'window' of both is given twice; both.window is the same"),
    ],
)
def test_settings_of_a_chain(monkeypatch, options, words):
    monkeypatch.setitem(EVICTIONS, "both", Both)
    with pytest.raises(ValueError, match=words):
        build_eviction("critical(both)", **options)
    named = {"both.epsilon": 0.5, "critical.epsilon": 0.25}
    assert build_eviction("critical(both)", **named) == CriticalKV(Both(epsilon=0.5), epsilon=0.25)
    defaults = {key: field.default for key, field in setting_fields("critical(both)").items()}
    assert defaults["both.epsilon"] == 0.0
    assert defaults["critical.epsilon"] == 1e-4
    assert defaults["window"] == defaults["both.window"] == 64
    assert "epsilon" not in defaults
    assert not any(key.endswith("base") for key in defaults)


NUMBERS = [
    (name, key, type(field.default))
    for name in [*EVICTIONS, *(f"{wrapper}(snapkv)" for wrapper in WRAPPERS)]
    for key, field in setting_fields(name).items()
    if key.startswith(f"{name.partition('(')[0]}.") and isinstance(field.default, int | float)
]


@pytest.mark.parametrize(("name", "key", "kind"), NUMBERS, ids=[key for _, key, _ in NUMBERS])
def test_numbers_and_switches_of_another_type_are_refused_in_words(name, key, kind):
    wrong = {bool: ["false", 0, None], int: ["3", 2.5, True, None, [1], 2**31, -(10**30)], float: ["3", True, [1]]}
    for value in wrong[kind]:
        named = key.replace(".", " ")
        if key.endswith((".window", "simlayerkv.recent")) and value == 2.5:  # a number, since a window may be a share
            words = f"^{named}=2.5 must be . or more entries, a whole number, or a share of the budget between 0 and 1"
        else:
            words = f"^{named} is .*; (it must be|at most 2,147,483,647)"
        with pytest.raises(ValueError, match=words):
            build_eviction(name, **{key: value})


def test_a_name_stands_in_one_registry():
    assert not set(EVICTIONS) & set(WRAPPERS)
