"""Pages that programs make hold all there is, and say of originals what the table says."""

import re
import tomllib

import pytest
from making import catalogue
from making.catalogue import SHELVES, catalogue_page, shelf_page
from making.commands import command_page, commands_page
from making.kinds import CONTEXT_KIND, EVICTION_KINDS, REDUCER_KINDS, WRAPPER_KIND, page_of
from making.methods import context_cards, eviction_cards, reducer_cards, wrapper_cards
from making.originals import beside_original
from making.pictures import ANCHOR, ROUTED, TOKENS, cache_picture
from making.results import results_page

from subtoken_train.cli.main import COMMANDS
from subtoken_train.evictions import EVICTIONS, WRAPPERS
from subtoken_train.reducers import REDUCERS
from subtoken_train.resources import recipe_files
from tests.support.readme_blocks import ROOT


def test_every_command_and_action_has_its_help():
    listed = commands_page()
    for name, summary in COMMANDS.items():
        assert f"[`{name}`](cli/{name}.md) | {summary} |\n" in listed
        assert command_page(name).startswith(f"# subtoken-train {name}\n")
    assert "usage: subtoken-train recipes anchor" in command_page("recipes")
    assert "--eviction-keep" in command_page("generate")


def test_every_recipe_is_in_the_catalogue_once():
    pages = "".join(map(shelf_page, SHELVES))
    for name in recipe_files():
        assert pages.count(f"| [`{name.rpartition('/')[2]}`](") == 1
    assert "(../tiny_fastv25_s16k4.yaml) | tiny-llava · FastV 25 % (16 of 64)" in pages
    assert sum(map(int, re.findall(r"\| (\d+) \|\n", catalogue_page()))) == len(recipe_files())


def test_a_folder_of_recipes_without_a_page_is_refused_in_words(monkeypatch):
    monkeypatch.setattr(catalogue, "SHELVES", SHELVES[1:])
    with pytest.raises(ValueError, match=r"recipes of 'tiny' must be on one page; name them in SHELVES of docs/making"):
        catalogue_page()


@pytest.mark.parametrize(
    ("methods", "kinds"), [(EVICTIONS, EVICTION_KINDS), (WRAPPERS, (WRAPPER_KIND,)), (REDUCERS, REDUCER_KINDS)]
)
def test_every_method_has_its_card_on_one_page(methods, kinds):
    made = {WRAPPER_KIND: wrapper_cards, CONTEXT_KIND: context_cards}
    cards = eviction_cards if methods is EVICTIONS else reducer_cards
    pages = {kind.page: made[kind]() if kind in made else cards(kind) for kind in kinds}
    assert [name for name in methods if f"\n## {name}\n" not in pages[page_of(name, kinds)]] == []
    assert sorted(name for kind in kinds for name in kind.names) == sorted(methods)


def test_a_method_without_a_page_is_refused_in_words():
    with pytest.raises(ValueError, match=r"the card of 'newer' is on no page; name it in one kind of .*/kinds\.py"):
        page_of("newer", EVICTION_KINDS)
    with pytest.raises(ValueError, match=r"is on evictions/visual\.md and evictions/visual\.md; name it in one kind"):
        page_of("vl_cache", (*EVICTION_KINDS, EVICTION_KINDS[0]))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("q_filter", "There are no recorded outputs of an original to compare with."),
        ("duo_attention", "Beside the original (1 recorded case): entries or counts that differ 0."),
        (
            "critical",  # its rows stand under critical(knorm)
            "Beside the original (3 recorded cases): entries or counts that differ 0; largest difference of scores and "
            "tensors 7.6e-05.",
        ),
        (
            "tgv_kv",
            "Beside the original (4 recorded cases, 2 of formulas that are a reconstruction): largest difference of "
            "scores and tensors 7.6e-06.",
        ),
        (
            "ada",
            "Beside the original (3 recorded cases): entries or counts that differ 0; the release misses its own "
            "budget by up to 1.",
        ),
    ],
)
def test_what_is_said_of_an_original(name, said):
    assert beside_original(name) == said


def test_results_lead_to_every_section_with_a_table():
    page = results_page()
    assert "[Whole caches beside kvpress](../docs/speed.md#whole-caches-beside-" in page
    assert "[The mini-suite](../docs/mini_suite.md)" in page
    assert "| `keydiff` | kvpress_keydiff: places that differ | 0 |" in page


def test_the_drawing_has_as_many_tokens_as_it_says():
    """Empty places have another class; a routed token has four stored groups."""
    picture = cache_picture()
    assert picture.count('class="k"') == TOKENS + 2 * ROUTED + ANCHOR
    assert picture.count('class="v"') == TOKENS + ROUTED + 4 * ROUTED + ANCHOR
    assert "8 of 32 tokens: 15.625 %" in picture
    assert "5 of 32 tokens: 15.625 %" in picture


def test_every_extra_is_explained():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    assert [name for name in extras if f"\n| `{name}` |" not in page] == []
