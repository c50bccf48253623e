"""What the site's build adds to ``docs/``: pages of other folders, pages from programs, and links that lead somewhere.

``mkdocs.yml`` names this file; its own folder is on the path while it is loaded, so that ``making`` is found.
"""

import re
from functools import partial
from pathlib import Path

from making.catalogue import SHELVES, catalogue_page, shelf_page
from making.commands import command_page, commands_page
from making.glossary import with_definitions
from making.kinds import CONTEXT_KIND, EVICTION_KINDS, VISUAL_KINDS, WRAPPER_KIND
from making.links import Links
from making.methods import (
    context_cards,
    eviction_cards,
    evictions_page,
    reducer_cards,
    reducers_page,
    selectors_page,
    wrapper_cards,
)
from making.paper_items import PAPERS, paper_items_page, paper_page
from making.results import results_page
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from subtoken_train.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
SHOWN = (
    "recipes/README.md",
    "recipes/recipe.schema.json",
    "recipes/grid.schema.json",
    "benchmarks/README.md",
    "benchmarks/results/pruners_scenes.svg",
    "benchmarks/results/real_text/arms.csv",
    "benchmarks/results/real_text/frontier.svg",
    "benchmarks/results/real_text/needles.svg",
    "benchmarks/results/real_text/words.csv",
    "benchmarks/results/real_text/words_qwen05.csv",
    "checkpoints/README.md",
    "data/README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
)
"""Files of the repository that the site shows at the same path."""
CATALOGUE = {
    "recipes/catalogue.md": catalogue_page,
    **{f"recipes/catalogue/{shelf.page}.md": partial(shelf_page, shelf) for shelf in SHELVES},
}
OF_COMMANDS = {f"cli/{name}.md": partial(command_page, name) for name in COMMANDS}
OF_METHODS = {
    "evictions.md": evictions_page,
    **{kind.page: partial(eviction_cards, kind) for kind in EVICTION_KINDS},
    WRAPPER_KIND.page: wrapper_cards,
    "reducers.md": reducers_page,
    **{kind.page: partial(reducer_cards, kind) for kind in VISUAL_KINDS},
    CONTEXT_KIND.page: context_cards,
    "selectors.md": selectors_page,
}
MADE = {
    **CATALOGUE,
    **OF_METHODS,
    "cli.md": commands_page,
    **OF_COMMANDS,
    "results.md": results_page,
    "papers.md": paper_items_page,
    **{f"papers/{paper}.md": partial(paper_page, paper) for paper in PAPERS},
}
"""Pages that only the site has, by path."""
MOVED = {
    "CHANGELOG": "releases/0.2.0 releases/0.3.0",
    "budgets": "choose_budget equal_bytes",
    "quality": "benchmarks/results/packed_matrix quality/real_weights",
    "real_text": "real_text/axes real_text/equal_bytes real_text/one_budget real_text/one_budget_qwen "
    "real_text/one_budget_smollm2 real_text/qwen real_text/qwen15 real_text/ruler real_text/smollm2 real_text/trained",
    "speed": "speed/benchmark speed/gpus speed/prompts speed/training",
    "trained_arms": "trained_arms/adapted trained_arms/bytes trained_arms/layer2 trained_arms/layer4 "
    "trained_arms/recall trained_arms/two_stage trained_arms/visionzip trained_rivals",
    "trials": "benchmarks/results/screens benchmarks/results/screens/bits quality/recall trained_arms/beyond "
    "trained_arms/first trials/embedded trials/layer4 trials/ratios trials/real_models trials/routers trials/texts "
    "trials/training",
}
"""Pages, and the old addresses of what they hold now."""
_PAGES = {*SHOWN, *CATALOGUE}
_INTERVAL = re.compile(r"(?<= )\[[+-]?[\d.]+, [+-]?[\d.]+\](?=.*\|$)", re.MULTILINE)
"""An interval in a table stays on one line."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the commands below their overview, and link to the repository at the foot of every page, if it is known."""
    (reference,) = (part["Reference"] for part in config.nav or () if "Reference" in part)
    reference[reference.index("cli.md")] = {"Command line": ["cli.md", *OF_COMMANDS]}
    if address := config.extra["repository"]:
        config.extra["social"] = [{"icon": "material/source-repository", "link": address, "name": "the repository"}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is shown from other folders, and what is made."""
    for name in SHOWN:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    for name, page in MADE.items():
        files.append(File.generated(config, name, content=page()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The text as the site's reader takes it."""
    address = config.extra["repository"] or ""
    markdown = markdown.replace("git+$REPOSITORY_URL", f"git+{address}") if address else markdown
    text = Links(ROOT, _PAGES, address).page_text(page.file.src_uri, markdown)
    text = with_definitions(page.file.src_uri, text)
    return _INTERVAL.sub(lambda interval: interval[0].replace(" ", "\u00a0"), text)


def on_post_build(config: MkDocsConfig) -> None:
    """Leave a page at every old address that leads to the new one."""
    for new, old in ((new, old) for new, each in MOVED.items() for old in each.split()):
        page, address = Path(config.site_dir) / old / "index.html", f"{'../' * (old.count('/') + 1)}{new}/"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(
            f'<script>location.replace("{address}" + location.hash)</script>'  # a section's, too
            f'<meta http-equiv="refresh" content="0; url={address}"><a href="{address}">Moved to {new}</a>\n',
            encoding="utf-8",
        )
