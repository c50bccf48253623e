"""Put what was tried into ``docs/trials.md``, from the committed table of trials; a test checks it.

python -m benchmarks.trials_page
"""

import pandas as pd

from benchmarks.pages import put
from benchmarks.tiny_comparison import ROOT

RESULTS, PAGE = ROOT / "benchmarks/results", ROOT / "docs/trials.md"


def lines(topic: str) -> str:
    """Return one topic's trials without records, a line each."""
    trials = pd.read_csv(RESULTS / "trials.csv", dtype=str)
    own = trials[trials["topic"] == topic].drop(columns="topic")
    rows = [own.columns, ["---"] * own.shape[1], *own.itertuples(index=False)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    """Write the page's tables."""
    for topic in pd.read_csv(RESULTS / "trials.csv")["topic"].unique():
        put(PAGE, topic, lines(topic))


if __name__ == "__main__":
    main()
