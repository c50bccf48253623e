"""benchmarks/run_records.py: what is added comes back, to the digit."""

from __future__ import annotations

from benchmarks.run_records import add_run, has_run, read_runs


def test_a_table_gives_back_what_was_added(tmp_path):
    folder = tmp_path / "new"
    assert read_runs(folder) == []
    measured = {"log_likelihood": [-0.1234, None], "digit_f1": [1.0, 0.0]}
    runs = [
        {"arm": "b", "seed": 0, "scores": [0.3333, 1.0], "kinds": ["read", "list"], "measures": measured},
        {"arm": "a", "seed": 1, "scores": [], "predictions": ["é\n", ""], "commit": "c0ffee"},
        {"arm": "a", "seed": 0, "scores": [1e-300], "measures": {}},
    ]
    for run in runs:
        add_run(folder, run)
    assert read_runs(folder) == [runs[2], runs[1], runs[0]]
    assert has_run(folder, "a", 1)
    assert not has_run(folder, "b", 1)


def test_a_run_takes_the_place_of_the_one_before(tmp_path):
    for score in (0.0, 1.0):
        add_run(tmp_path, {"arm": "a", "seed": 0, "scores": [score]})
    assert read_runs(tmp_path) == [{"arm": "a", "seed": 0, "scores": [1.0]}]
    assert sorted(path.name for path in tmp_path.iterdir()) in (["runs.parquet"], [".runs.lock", "runs.parquet"])
