"""Tables of tests are cached in their own folders."""

import datasets
import pytest


@pytest.fixture(autouse=True)
def own_dataset_cache(tmp_path_factory, monkeypatch):
    """``datasets`` converts Parquet files below this folder instead of the user's cache."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
