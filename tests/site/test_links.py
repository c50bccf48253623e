"""Markdown of a code host becomes the site's: links that leave ``docs/``, lists, and the marks of code blocks."""

import re

import pytest
from making.links import Links, outside_code

from tests.support.readme_blocks import PAGES, ROOT

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


def test_pictures_move_with_their_pages():
    text = Links(ROOT, {"benchmarks/results/mini_suite.svg"}, "").page_text(
        "results.md", "![a](../benchmarks/results/mini_suite.svg)"
    )
    assert text == "![a](benchmarks/results/mini_suite.svg)"


def test_tests_that_pages_name_are_there():
    named = {name for page in PAGES for name in re.findall(r"`(tests/[\w/.]+)`", page.read_text(encoding="utf-8"))}
    assert len(named) > 3
    assert [name for name in named if "NAME" not in name and not (ROOT / name).exists()] == []


def test_a_list_after_a_line_gets_its_blank_line_and_code_stays():
    text = "These:\n- one\n  more\n- two\n\n```\nsay:\n- [a](../recipes/README.md)\n```\n"
    expected = "These:\n\n- one\n  more\n- two\n\n```\nsay:\n- [a](../recipes/README.md)\n```\n"
    assert Links(ROOT, OUTSIDE, "").page_text("choosing.md", text) == expected


def test_needs_are_said_and_other_marks_are_not():
    text = "<!-- needs: a GPU -->\n```\nx\n```\n<!-- run: in a checkout -->\n```\ny\n```\n<!-- shows -->\n```\nz\n```\n"
    made = Links(ROOT, OUTSIDE, "").page_text("choosing.md", text)
    assert made == "*Needs a GPU:*\n\n```\nx\n```\n\n```\ny\n```\n\n```\nz\n```\n"


def test_code_is_not_changed():
    assert outside_code("a\n```\na\n```\na", str.upper) == "A\n```\na\n```\nA"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_code_host_finds_what_a_page_links_to(path):
    """On a code host nothing is made in a build: every relative link is a file."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    targets = [target for target in re.findall(r"\]\(([^)#\s]+)", text) if ":" not in target]
    assert [target for target in targets if not (path.parent / target).exists()] == []
