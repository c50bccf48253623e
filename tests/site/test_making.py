"""Pages that programs make hold all there is, and say of originals what the table says."""

import re
import tomllib

import pytest
from making.catalogue import SHELVES, catalogue_page, shelf_page
from making.kinds import CONTEXT_KIND, EVICTION_KINDS, REDUCER_KINDS, WRAPPER_KIND, page_of
from making.links import Links
from making.methods import context_cards, eviction_cards, reducer_cards, wrapper_cards
from making.paper_items import PAPERS, part_faults, read_items

from subtoken_train.evictions import EVICTIONS, WRAPPERS
from subtoken_train.reducers import REDUCERS
from subtoken_train.resources import recipe_files
from tests.support.places import PAGES, ROOT


def test_every_recipe_is_in_the_catalogue_once():
    pages = "".join(map(shelf_page, SHELVES))
    for name in recipe_files():
        assert pages.count(f"| [`{name.rpartition('/')[2]}`](") == 1
    assert "(../tiny_fastv25_s16k4.yaml) | tiny-llava · FastV 25 % (16 of 64)" in pages
    assert sum(map(int, re.findall(r"\| (\d+) \|\n", catalogue_page()))) == len(recipe_files())


@pytest.mark.parametrize(
    ("methods", "kinds"), [(EVICTIONS, EVICTION_KINDS), (WRAPPERS, (WRAPPER_KIND,)), (REDUCERS, REDUCER_KINDS)]
)
def test_every_method_has_its_card_on_one_page(methods, kinds):
    made = {WRAPPER_KIND: wrapper_cards, CONTEXT_KIND: context_cards}
    cards = eviction_cards if methods is EVICTIONS else reducer_cards
    pages = {kind.page: made[kind]() if kind in made else cards(kind) for kind in kinds}
    assert [name for name in methods if f"\n## {name}\n" not in pages[page_of(name, kinds)]] == []
    assert sorted(name for kind in kinds for name in kind.names) == sorted(methods)


def test_every_extra_is_explained():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    assert [name for name in extras if f"\n| `{name}` |" not in page] == []


HOST = "https://code.example/me/it"
OUTSIDE = {"recipes/README.md", "benchmarks/README.md", "benchmarks/results/screens/README.md", "CONTRIBUTING.md"}


def link(page, target, address=HOST):
    return Links(ROOT, OUTSIDE, address).page_text(page, f"a [b]({target}) c")


@pytest.mark.parametrize(
    ("page", "target", "leads"),
    [
        ("choosing.md", "trials.md#a", "trials.md#a"),
        ("choosing.md", "../recipes/README.md#grids", "recipes/README.md#grids"),
        ("recipes/README.md", "../docs/trials.md", "../trials.md"),
        ("CONTRIBUTING.md", "docs/architecture.md", "architecture.md"),
        ("benchmarks/README.md", "results/screens/README.md", "results/screens/README.md"),
        ("choosing.md", "../subtoken_train/types.py", f"{HOST}/blob/HEAD/subtoken_train/types.py"),
        ("choosing.md", "../notebooks", f"{HOST}/blob/HEAD/notebooks"),
        ("own_router.md", "example_package/pyproject.toml", f"{HOST}/blob/HEAD/docs/example_package/pyproject.toml"),
        ("choosing.md", "../nowhere.md", "../nowhere.md"),  # left for the strict build to name
        ("choosing.md", "https://a.example/b.md", "https://a.example/b.md"),
        ("choosing.md", "#here", "#here"),
    ],
)
def test_where_a_link_leads(page, target, leads):
    assert link(page, target) == f"a [b]({leads}) c"


def test_without_an_address_a_link_to_a_source_is_its_words():
    assert link("choosing.md", "../subtoken_train/types.py", address="") == "a b c"


def test_a_list_after_a_line_gets_its_blank_line_and_code_stays():
    text = "These:\n- one\n  more\n- two\n\n```\nsay:\n- [a](../recipes/README.md)\n```\n"
    expected = "These:\n\n- one\n  more\n- two\n\n```\nsay:\n- [a](../recipes/README.md)\n```\n"
    assert Links(ROOT, OUTSIDE, "").page_text("choosing.md", text) == expected


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_code_host_finds_what_a_page_links_to(path):
    """On a code host nothing is made in a build: every relative link is a file."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    targets = [target for target in re.findall(r"\]\(([^)#\s]+)", text) if ":" not in target]
    assert [target for target in targets if not (path.parent / target).exists()] == []


ITEMS = read_items()


@pytest.mark.parametrize("paper", PAPERS)
def test_items_are_sound_and_what_their_worst_part_is(paper):
    assert list(ITEMS) == list(PAPERS)
    assert [fault for item in ITEMS[paper] for fault in item.faults()] == []
    assert part_faults(ITEMS[paper]) == []
    names = [item.item for item in ITEMS[paper]]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("paper", ITEMS)
def test_every_numbered_table_and_figure_has_an_item(paper, shared):
    """Those that the paper's text names; "Table 3: ..." is Table 3's."""
    (text,) = (path.read_text(encoding="utf-8") for path in (shared / "papers").glob(f"{paper}*.txt"))
    numbered = {f"{kind} {number}" for kind, number in re.findall(r"\b(Table|Figure)s? (\d+)", text)}
    found = {match[0] for item in ITEMS[paper] if (match := re.match(r"(Table|Figure) \d+", item.item))}
    assert numbered <= found, sorted(numbered - found)
