"""The drawings of the pages, as SVG that follows the reader's light or dark; shares come from ``KVBudget``.

Legend of sizes: one cell is a value group of one token; a key is a bar as wide as its value.
"""

from subtoken_train.ledger.kv_budget import KVBudget

STYLE = (
    "svg{font-family:sans-serif;font-size:13px;fill:#24292f}.s{fill:#57606a}.k{fill:#0969da}.v{fill:#1a7f37}"
    ".o{fill:none;stroke:#d0d7de}.b{fill:#eaeef2}.l{stroke:#57606a;fill:none}.h{font-weight:bold}"
    "@media(prefers-color-scheme:dark){svg{fill:#e6edf3}.s{fill:#9aa4b0}.k{fill:#58a6ff}.v{fill:#3fb950}"
    ".o{stroke:#3d444d}.b{fill:#2a313c}.l{stroke:#9aa4b0}}"
)
TOKENS, GROUPS, KEPT = 32, 16, 4
CELL, ROW = 6, 7
WIDTH = GROUPS * CELL
BUDGET = KVBudget(0.25, GROUPS, KEPT)
ROUTED = TOKENS // 4
ANCHOR = int(TOKENS * BUDGET.exact_total)


def _svg(width: int, height: int, title: str, words: str, parts: list[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-labelledby="t d">',
        f'<title id="t">{title}</title>',
        f'<desc id="d">{words}</desc>',
        f"<style>{STYLE}</style>",
    )
    return "\n".join([*head, *parts, "</svg>\n"])


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" class="{kind}">{words}</text>'


def _box(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" class="{kind}"/>'


def _stays(token: int, kept: int) -> bool:
    """Which tokens of a column stay: spread evenly, for the drawing alone."""
    return token * kept % TOKENS < kept


def _groups(token: int, kept: int) -> set[int]:
    """Which groups of a token stay, for the drawing alone."""
    return set(sorted(range(GROUPS), key=lambda group: (group * 11 + token * 7) % 17)[:kept])


def _column(x: int, tokens: int, groups: int, heading: str, below: str) -> list[str]:
    """A cache: a key and the value's groups for every token, empty where nothing is stored."""
    parts = [_text(x, 16, heading, "h"), _text(x, 34, "keys", "s"), _text(x + WIDTH + 10, 34, "values", "s")]
    for token in range(TOKENS):
        y, kept = 42 + token * ROW, _stays(token, tokens)
        parts.append(_box(x, y, WIDTH, ROW - 2, "k" if kept else "o"))
        if kept and groups == GROUPS:
            parts.append(_box(x + WIDTH + 10, y, WIDTH, ROW - 2, "v"))
            continue
        parts.append(_box(x + WIDTH + 10, y, WIDTH, ROW - 2, "o"))
        for group in _groups(token, groups) if kept else ():
            parts.append(_box(x + WIDTH + 10 + group * CELL, y, CELL - 1, ROW - 2, "v"))
    return [*parts, _text(x, 42 + TOKENS * ROW + 18, below, "s")]


def cache_picture() -> str:
    """Four caches side by side: everything, fewer tokens, fewer tokens and groups, and the anchor of equal bytes."""
    columns = [
        (TOKENS, GROUPS, "no compression", KVBudget(1, GROUPS, GROUPS)),
        (ROUTED, GROUPS, "25 % of the tokens", KVBudget(0.25, GROUPS, GROUPS)),
        (ROUTED, KEPT, f"and {KEPT} of {GROUPS} groups", BUDGET),
        (ANCHOR, GROUPS, "the matched anchor", KVBudget(ANCHOR / TOKENS, GROUPS, GROUPS)),
    ]
    step = 2 * WIDTH + 34
    parts: list[str] = []
    for place, (tokens, groups, heading, budget) in enumerate(columns):
        said = f"{tokens} of {TOKENS} tokens: {100 * budget.total_kv_fraction:g} %"
        parts += _column(4 + place * step, tokens, groups, heading, said)
    words = (
        f"One layer's cache, {TOKENS} tokens: all; {ROUTED} whole ones; {ROUTED} with whole keys and {KEPT} of "
        f"{GROUPS} value groups; and {ANCHOR} whole ones, which take the same bytes."
    )
    return _svg(4 * step - 16, 42 + TOKENS * ROW + 26, "Tokens and value groups of a cache", words, parts)


STAGES = (
    ("picture, text", ("what the prompt", "is made of")),
    ("vision tower", ("VisionZip, FasterVLM,", "PruMerge, VisPruner")),
    ("input", ("FastV, DART, random,", "DivPrune, CDPruner")),
    ("decoder layers", ("FastV (decoder), Quest;", "routers in each layer")),
    ("first token", ("read from", "the prompt's pass")),
    ("cache", ("evictions choose", "among what is left")),
    ("answer", ("from packed storage;", "eviction_every")),
)


def stages_picture() -> str:
    """The way of a prompt from left to right, and what acts where."""
    width, parts = 154, []
    for place, (name, lines) in enumerate(STAGES):
        x = 4 + place * width
        parts += [_box(x, 30, width - 26, 40, "b"), _text(x + (width - 26) / 2, 55, name, "h", "middle")]
        parts += [_text(x + (width - 26) / 2, 90 + 17 * line, words, "s", "middle") for line, words in enumerate(lines)]
        if place + 1 < len(STAGES):
            parts.append(f'<path d="M{x + width - 24} 50h20m-5 -5l5 5l-5 5" class="l"/>')
    for first, last, words in ((1, 3, "in prefill: the first token depends on it"), (5, 6, "after prefill: it cannot")):
        left, right = 4 + first * width, 4 + last * width + width - 26
        parts += [f'<path d="M{left} 24v-6H{right}v6" class="l"/>', _text((left + right) / 2, 12, words, "s", "middle")]
    words = "A prompt's way: " + "; ".join(f"{name}: {' '.join(lines)}" for name, lines in STAGES)
    return _svg(4 + len(STAGES) * width - 22, 116, "What acts when", words, parts)
