"""Commands that make or fetch the data files of shipped recipes and pages, and the samples inside the package."""

import shutil
from pathlib import Path

from subtoken_train.errors import shell_words

MIX665K, MIX665K_RECORDS = "llava_v1_5_mix665k.json", 665_298  # of LLaVA-v1.5's instruction tuning
MEAN_RECORDS = {MIX665K: (768_010_438 / MIX665K_RECORDS / 4, 1 - 40_000 / MIX665K_RECORDS)}
"""By file: text tokens of a mean record, and the share of records with an image. Estimated, no count is published:
bytes of the set as Arrow (``dataset_size`` on the Hub's card of mrm8488/llava_v1_5_mix665k) at four a token, and "40K
ShareGPT data", which have no image (card of liuhaotian/llava-v1.5-7b)."""
MEAN_SPREAD = 0.1  # by how much operations that follow from such a mean may be off, as is assumed
DOWNLOAD_BYTES = {("Salesforce/wikitext", "wikitext-103-raw-v1"): 315_000_000}
"""By data set of the Hub and configuration: its Parquet files, all splits."""
_MADE = {"data/scenes": "scenes", "data/english_text": "english", "data/samples": "samples"}


def fetch_command(path: str | Path) -> str | None:
    """Return the command that makes a data file, or says where its parts come from; None for a file of one's own."""
    path = Path(path)
    if path.name == MIX665K:
        return f"subtoken-train data llava665k --root {shell_words(path.parent)}"
    return next((f"subtoken-train data {name}" for place, name in _MADE.items() if place in path.as_posix()), None)


def absent(what: str, path: str | Path) -> ValueError:
    """Return the error of a data file that is not there, with the command that fetches it, where there is one."""
    command = fetch_command(path)
    return ValueError(f"{what} {path} does not exist; {f'get it: {command}' if command else 'check the path'}")


def write_samples(folder: str | Path, overwrite: bool = False) -> None:
    """Copy the shipped ``data/samples``: two pictures, three texts, and folders as a user of ``init`` may have them."""
    from subtoken_train.artifact.whole_folder import FolderKind, whole_folder
    from subtoken_train.resources import resource

    kind = FolderKind("a folder of samples", "subtoken-train data samples")
    with whole_folder(Path(folder), overwrite, kind) as partial:
        shutil.copytree(resource("data/samples"), partial, dirs_exist_ok=True)
