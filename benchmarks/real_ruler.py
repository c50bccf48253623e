"""RULER's made tasks on a real model: from a grid's results to a compact record.

    subtoken-train evaluate --config recipes/real/ruler.yaml       # 1,024 tokens; stopped, it goes on
    subtoken-train evaluate --config recipes/real/ruler_2k.yaml    # 2,048
    python -m benchmarks.real_ruler --results results/real_ruler   # its finished arms into its record

Arms that the record has stay in it, unless the results have them anew. A task judges methods only where the full cache
scores half of it, which is measured first.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.real_text import NAMES, OUT, add, read

RECORDS = OUT / "ruler"
"""A file for each model and length of the prompts."""
MODELS = {**NAMES, "qwen15": "Qwen2.5-Coder-1.5B"}
FULL = "full cache"
JUDGES = 0.5
"""Of a task's score, what the full cache must reach."""


def compact(results: Path, task: str = "ruler_synthetic") -> dict[str, Any]:
    """Return what a grid's finished arms say: scores and bytes of every sample, in the order of the first arm's."""
    arms, names, about = {}, None, {}
    for path in sorted(results.glob(f"*/{task}/manifest.json")):
        manifest = json.loads(path.read_text(encoding="utf-8"))
        lines = [line for file in sorted(path.parent.glob("samples-*.jsonl")) for line in file.read_text().splitlines()]
        samples = sorted((json.loads(line) for line in lines), key=lambda sample: str(sample["id"]))
        if len(samples) != manifest["expected_rows"]:
            print(f"{path.parent.parent.name}: {len(samples)} of {manifest['expected_rows']} answers, left out")
            continue
        own = [f"{sample['id']} {sample['prompt_sha256']}" for sample in samples]
        model = Path(manifest["arm"]["backbone"]).name.removesuffix("-axes")
        asked = {"model": model, "device": manifest["settings"]["device"], "options": manifest["options"]}
        names, about = names or own, about or asked
        if own != names or asked != about:
            raise ValueError(
                f"{path.parent} was asked otherwise than the arms before it: other prompts, model or device"
            )
        if (words := _words(manifest["arm"])) in arms:
            raise ValueError(f"{path.parent} is a second arm called {words!r}")
        arms[words] = {
            "scores": [sample["score"] for sample in samples],
            "share": [_bytes(sample) / sample["region_dense_bytes"] for sample in samples],
        }
    return {**about, "kinds": [name.rsplit("-", 1)[0] for name in names or []], "arms": arms}


def joined(earlier: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record with the arms found; both must have been asked the same."""
    for key in ("model", "device", "options", "kinds"):
        if earlier[key] != found[key]:
            raise SystemExit(f"the record was asked otherwise ({key}: {earlier[key]}); move it away")
    return {**found, "arms": {**earlier["arms"], **found["arms"]}}


def _bytes(sample: Mapping[str, Any]) -> int:
    return int(sample["region_bytes"]) + int(sample["index_bytes"])


def _words(arm: Mapping[str, Any]) -> str:
    kept = [str(arm[name]) for name in ("reducer", "groups", "eviction") if arm[name] != "-"]
    return ", ".join([*kept, *(["values turned"] if str(arm["backbone"]).endswith("-axes") else [])]) or FULL


def judges(record: Mapping[str, Any]) -> list[str]:
    """Return the tasks of which the full cache scores half."""
    kinds, full = np.array(record["kinds"]), np.array(record["arms"][FULL]["scores"])
    return [task for task in record["options"]["tasks"] if full[kinds == task].mean() >= JUDGES]


def words_of(settings: Mapping[str, Any]) -> str:
    """Return how a record names an arm, from a grid's settings of it."""
    kept = []
    if "groups" in settings:
        kept.append("S{}K{} {}".format(*settings["groups"].split(","), settings["selector"]))
    if numbers := [str(settings[key]) for key in ("eviction", "eviction_keep", "kv_dtype") if key in settings]:
        kept.append(" ".join(numbers))
    return ", ".join([*kept, *(["values turned"] if settings["backbone"].endswith("-axes") else [])]) or FULL


def main() -> None:
    """Write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="folder of the grid's results")
    record = compact(parser.parse_args().results)
    file = RECORDS / f"{record['model']}-{record['options']['length']}.jsonl.xz"
    for earlier in read(file):
        record = joined(earlier, record)
    file.unlink(missing_ok=True)
    add(file, record)


if __name__ == "__main__":
    main()
