"""Put what was tried into ``docs/trials.md`` and ``docs/trials/embedded.md``, from committed records; a test checks it.

python -m benchmarks.trials_page
"""

import pandas as pd

from benchmarks.comparison_lists import Comparison, read_comparison
from benchmarks.comparison_tables import read_records, trials_markdown
from benchmarks.pages import put
from benchmarks.tiny_comparison import ROOT

RESULTS, PAGE = ROOT / "benchmarks/results", ROOT / "docs/trials.md"
EMBEDDED = ("first", "visionzip", "beyond", "fill", "screens")
"""Lists of exploratory comparisons, by the beginning of their file's name."""


def lines(topic: str) -> str:
    """Return one topic's trials without records, a line each."""
    trials = pd.read_csv(RESULTS / "trials.csv", dtype=str)
    own = trials[trials["topic"] == topic].drop(columns="topic")
    rows = [own.columns, ["---"] * own.shape[1], *own.itertuples(index=False)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def comparisons() -> dict[str, Comparison]:
    """Return the exploratory comparisons, or each of their sections, by name."""
    found = {}
    for name in EMBEDDED:
        whole = read_comparison(ROOT / f"recipes/ablations/{name}_tiny.yaml")
        found |= {f"{name}_{part}": whole.section(part) for part in whole.sections} or {name: whole}
    return found


def main() -> None:
    """Write both pages' tables."""
    for topic in pd.read_csv(RESULTS / "trials.csv")["topic"].unique():
        put(PAGE, topic, lines(topic))
    for name, chosen in comparisons().items():
        put(PAGE.with_suffix("") / "embedded.md", name, trials_markdown(read_records(RESULTS / chosen.folder), chosen))


if __name__ == "__main__":
    main()
