"""The parser behind recipes: what it makes of a written value."""

from subtoken_train.cli.recipe import RecipeParser


class Limits:
    def __init__(self, batches: float | int | None = None, share: float = 1.0) -> None: ...


def test_a_whole_number_stays_one_whatever_the_order_of_its_types():
    parser = RecipeParser(default_env=False)
    parser.add_class_arguments(Limits, "limits")
    given = [
        parser.parse_args([f"--limits.batches={text}", "--limits.share=1"]).limits for text in ("3", "0.5", "null")
    ]
    assert [repr(limits.batches) for limits in given] == ["3", "0.5", "None"]
    assert repr(given[0].share) == "1.0"
