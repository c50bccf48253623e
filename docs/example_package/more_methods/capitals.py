"""A benchmark: capitals, in facts that are stated."""

from collections.abc import Sequence
from dataclasses import dataclass

from subtoken_train.evaluation.metrics.short_answers import ExactMatch
from subtoken_train.evaluation.tasks.task import Sample, Task

CAPITALS = {"France": "paris", "Japan": "tokyo", "Peru": "lima"}


@dataclass
class Capitals(Task):
    """Asks for capitals.

    Attributes:
        times: how often a fact is stated before the question.
    """

    name = "capitals"
    modality = "text"
    primary = "accuracy"
    scored_by = ExactMatch
    where = "Made here; there is nothing to fetch."
    needs_files = False

    times: int = 4

    def samples(self) -> Sequence[Sample]:
        """Return a question for each country."""
        made = []
        for country, city in CAPITALS.items():
            facts = f"The capital of {country} is {city}. " * self.times
            made.append(
                Sample(
                    country, f"{facts}\nThe capital of {country} is", {"answer": city}, context_characters=len(facts)
                )
            )
        return made
