from dataclasses import replace

import pytest

from subtoken_train.evictions import build_eviction
from subtoken_train.inference.batched import Outcome
from subtoken_train.inference.compression import Compression
from subtoken_train.plugins.harness import Counted
from subtoken_train.routing import RoutingConfig
from tests.support.helpers import compress
from tests.support.measured import MEASURED
from tests.support.text_families import text_family

OUTCOME = Outcome(
    **{**MEASURED, "kv_bytes": 60, "dense_kv_bytes": 100, "region_bytes": 20, "region_dense_bytes": 50},
    text="",
    token_ids=[],
    logprobs=[],
    greedy=[],
    keys_after=MEASURED["entries_after"],
)


def counted(compression=None, protocol="query_aware", routing=None):
    return Counted(compress(text_family(), routing), compression or Compression(), protocol)


def test_sums_and_fractions():
    subject = counted(
        Compression(build_eviction("snapkv"), 0.1, kv_dtype="int8"), routing=RoutingConfig("linear", 4, 1)
    )
    subject.add([OUTCOME, replace(OUTCOME, kv_bytes=20, region_bytes=5, entries_after=2)])
    facts = subject.facts
    assert facts["prompts"] == 2
    assert (facts["kv_bytes"], facts["dense_kv_bytes"], facts["kv_fraction_measured"]) == (80, 200, 0.4)
    assert facts["region_fraction_measured"] == 0.25
    assert (facts["entries_before"], facts["entries_after"]) == (80, 12)
    text = str(subject)
    assert text.startswith("subtoken: 2 prompts; none, linear S=4 K=1, snapkv 0.1 int8; protocol query_aware\n")
    subject.add([replace(OUTCOME, kv_bytes=130)])
    assert "KV of the prompts: 210 of 300 bytes kept (70.00%)" in str(subject)
    subject.add([replace(OUTCOME, kv_bytes=200)])
    assert "KV of the prompts: 410 of 400 bytes kept (100.00% + index)" in str(subject)
    assert "KV of the prompts: 80 of 200 bytes kept (40.00%)" in text
    assert "its entries, in any head: 12 of 80 (token, layer) pairs kept (15.00%)" in text


def test_prompts_that_lost_a_region_are_counted():
    subject = counted(Compression(build_eviction("snapkv"), 0.1, scope="all"))
    subject.add([OUTCOME])
    assert subject.facts["prompts_with_an_emptied_region"] == 0
    assert "nothing is left" not in str(subject)
    subject.add([replace(OUTCOME, emptied={"context": 2})])
    assert subject.facts["prompts_with_an_emptied_region"] == 1
    assert "snapkv 0.1 all: nothing is left of a whole region in some layer: context (1 of 2 prompts)" in str(subject)


def test_nothing_to_compress_is_said():
    subject = counted()
    assert "no prompt was run" in str(subject)
    subject.add([replace(OUTCOME, region_bytes=0, region_dense_bytes=0, entries_before=0, entries_after=0)])
    assert "no prompt had anything that may be compressed" in str(subject)
    assert subject.facts["region_fraction_measured"] is None


@pytest.mark.parametrize("protocol", ["query_aware", "context_first"])
def test_an_eviction_after_the_question_is_warned_about(protocol):
    assert counted(protocol=protocol).warning() is None
    warning = counted(Compression(build_eviction("snapkv"), 0.1), protocol).warning()
    assert (warning is None) == (protocol == "context_first")
    if warning:
        assert "cannot change the first token" in warning
