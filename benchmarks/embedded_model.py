"""What the embedded VLM answers with all its tokens: accuracy per kind, the majority answer, and with shuffled images.

    python benchmarks/embedded_model.py [--count 3000]

Fresh dev scenes, the real processor, greedy generation; *shuffled* gives every question another scene's image.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np

from subtoken_train.datasets.records import InstructionRecords
from subtoken_train.datasets.scene_files import write_scene_split
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.evaluation.intervals import bootstrap_interval
from subtoken_train.evaluation.metrics.scene_scores import scene_score
from subtoken_train.evaluation.runner.data_file import answer_records
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.load import load_family
from subtoken_train.reducers import build_reducer


def shuffled_copy(path: Path) -> Path:
    """The same questions, each with the image of the record after it."""
    records = json.loads(path.read_text())
    images = [record["image"] for record in records]
    for record, image in zip(records, images[1:] + images[:1], strict=True):
        record["image"] = image
    target = path.with_name("shuffled.json")
    target.write_text(json.dumps(records))
    return target


def main() -> None:
    """Print a markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=3000, help="questions")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    write_scene_split(folder, "dev", args.count, seed=77)
    family = load_family(BackboneConfig())
    reducer = build_reducer(name="none")
    backbone = CompressedBackbone(family, reducer).eval()
    plain = answer_records(backbone, InstructionRecords(folder / "dev.json"), batch_size=128)
    shuffled = answer_records(
        backbone, InstructionRecords(shuffled_copy(folder / "dev.json")), batch_size=128
    ).by_kind()
    print("| kind | questions | accuracy | majority answer | shuffled images |\n|---|---|---|---|---|")
    for kind, scores in plain.by_kind().items():
        answers = [str(record.reference["answer"]) for record in plain.records if record.kind == kind]
        common = Counter(answers).most_common(1)[0][0]
        majority = np.mean([scene_score(kind, common, answer) for answer in answers])
        low, high = bootstrap_interval(scores)
        cells = f"{100 * np.mean(scores):.1f} [{100 * low:.1f}, {100 * high:.1f}] | {100 * majority:.1f}"
        print(f"| `{kind}` | {len(scores)} | {cells} | {100 * np.mean(shuffled[kind]):.1f} |")


if __name__ == "__main__":
    main()
