"""MMBench and ScienceQA: how they are asked, and every file that is refused."""

import pytest

from subtoken_train.datasets.image_sources import open_image
from subtoken_train.evaluation.tasks import build_task
from tests.support.benchmark_folders import mmbench_parquet, prompts_of, reference_cases, scienceqa_parquet

LETTER = "\nAnswer with the option's letter from the given choices directly."
PROMPTS = {
    "llava": f"<image>\nA zoo.\nWhat is it?\nA. cat\nB. a\tdog{LETTER}",
    "lmms": f"<image>\nA zoo. What is it? There are several options:\nA. cat\nB. a\tdog\n{LETTER}",
    "vlmevalkit": (
        "<image>\nHint: A zoo.\nQuestion: What is it?\nOptions:\nA. cat\nB. a\tdog\n"
        "Please select the correct answer from the options above. \n"
    ),
}


@pytest.mark.parametrize("prompt", PROMPTS)
def test_how_mmbench_is_asked(tmp_path, prompt):
    folder = mmbench_parquet(tmp_path, [{"hint": "A zoo.", "index": 1_000_241}, {}])
    first, second = build_task("mmbench", folder, prompt=prompt).samples()
    assert first.prompt == PROMPTS[prompt]
    assert "zoo" not in second.prompt
    assert (first.id, first.kind) == ("1000241", "object")
    options = {"A": "cat", "B": "a\tdog"}
    assert first.reference == {"index": 1_000_241, "answer": "B", "options": options, "nan_options": "CD"}
    assert open_image(second.images[0]).getpixel((0, 0)) == (1, 0, 0)


def test_cells_without_an_option(tmp_path):
    rows = [{"C": None, "D": "nan"}, {"C": "bird", "D": "fish"}, {"C": None, "D": None}]
    samples = build_task("mmbench", mmbench_parquet(tmp_path, rows)).samples()
    assert [sample.reference.get("nan_options") for sample in samples] == ["D", None, None]


def test_reference_prompts(shared, tmp_path):
    cases = [case for case in reference_cases(shared, "mmbench") if case["kind"] == "prompt"]
    assert cases
    rows = [{**case["doc"], "index": n} for n, case in enumerate(cases)]
    prompts = prompts_of(build_task("mmbench", mmbench_parquet(tmp_path, rows), prompt="lmms"))
    assert prompts == [f"<image>\n{case['lmms_prompt']}" for case in cases]


NORTH = f"<image>\nContext: Look at the map.\nWhich is farthest north?\nA. Ohio\nB. Utah{LETTER}"


def test_scienceqas_parquet_form(tmp_path):
    first, second = build_task("scienceqa", scienceqa_parquet(tmp_path, [{}, {"hint": ""}])).samples()
    assert (first.id, first.prompt, first.kind) == ("test-0", NORTH, "social science")
    assert first.reference == {"answer": 1, "choices": 2, "image": True}
    assert second.prompt == NORTH.replace("Context: Look at the map.\n", "")
    full = build_task("scienceqa", scienceqa_parquet(tmp_path, [{}, {"image": None}], "FULL"), subset="full")
    _, sample = full.samples()  # a question without an image is a text
    assert sample.prompt == NORTH.removeprefix("<image>\n")
    assert (sample.images, sample.reference["image"], full.expected_rows) == ((), False, 4241)
