"""Settings, and backbones, that reducers refuse: what was written, and the words that must stand in the message."""

import pytest

from subtoken_train.reducers import build_reducer

BUILT = [
    ("fast_v", {}, r"unknown reducer 'fast_v'\. Did you mean 'fastv'\?"),
    ("kvzop", {}, "unknown reducer 'kvzop'. Did you mean 'kvzip'"),
    ("quest", {"layer": 2}, r"setting of quest 'layer'\. .*Allowed: keep_ratio, matches, page_size, round_up"),
    ("none", {}, r"reducer 'none' keeps every token, but keep_ratio=0\.5; set it to 1"),
    *((name, {"keep_ratio": 1.01}, r"keep_ratio=1\.01 must lie in \(0, 1\]") for name in ("none", "random", "fastv")),
    *(("fastv", {"keep_ratio": ratio}, r"must lie in \(0, 1\]") for ratio in (0.0, -0.5, 25)),
    ("fastv", {"layer": 0}, "fastv layer is 0; it must be 1 to 10,000"),
    ("fastv", {"stage": "embed"}, r"unknown fastv stage 'embed'\. Did you mean 'embeds'\? Allowed: decoder, embeds"),
    ("fastv", {"ranking": "froze"}, "'froze'.*'frozen'"),
    ("fastv", {"ranking": "frozen", "stage": "decoder"}, "stage: embeds, or reducer.ranking: adapted"),
    *((name, {"ranking": "frozen"}, "setting of .* 'ranking'") for name in ("visionzip", "none", "quest")),
    ("visionzip", {"merge_dropped": True}, "for fastv, .* not for visionzip: it merges already: its contextual tokens"),
    ("prumerge", {"merge_dropped": True}, "not for prumerge: it merges already"),
    ("sparsevlm", {"merge_dropped": True}, "not for sparsevlm: version 1 merges already"),
    *((name, {"merge_dropped": True}, f"unknown setting of {name} 'merge_dropped'") for name in ("quest", "none")),
    ("dart", {"layer": 3}, "layer 3 is for DART's stage decoder, and stage 'embeds' reads no layer"),
    ("dart", {"stage": "tower"}, r"unknown dart stage 'tower'.*Allowed: decoder, embeds"),
    ("vispruner", {"important": 1.5}, r"vispruner important is 1\.5; it must be 0 to 1"),
    ("sparsevlm", {"version": 3}, "unknown sparsevlm version 3. Allowed: 1, 2"),
    ("sparsevlm", {"heads": 0}, "sparsevlm heads is 0"),
    ("pyramiddrop", {"stages": 1}, "pyramiddrop stages is 1; it must be 2 to 10,000"),
    ("fitprune", {"calibration": "nowhere.json"}, r"fitprune calibration nowhere\.json is not a file"),
    ("quest", {"page_size": 0}, "quest page_size is 0; it must be"),
    ("quest", {"window": -1}, "quest window is -1; it must be"),
    ("random", {"seed": -1}, "random seed is -1"),
    ("compactor", {"sinks": -1}, "compactor sinks is -1"),
    ("compactor", {"sketch_seed": -1}, "compactor seed is -1"),
    ("compactor", {"page_size": 4}, "unknown setting of compactor 'page_size'"),
    ("expected_attention", {"future": 0}, "expected_attention future is 0"),
]


@pytest.mark.parametrize(("name", "settings", "words"), BUILT)
def test_a_wrong_setting_is_refused_in_words(name, settings, words):
    with pytest.raises(ValueError, match=words):
        build_reducer(name, **{"keep_ratio": 0.5, **settings})


FIT = [
    ("fastv", {"layer": 5}, "llava", 4, "with stage=embeds, layer=5, .*does not fit a model of 4 layers"),
    ("fastv", {"layer": 4, "stage": "decoder"}, "llava", 4, "with stage=decoder, layer=4, .*does not fit a model of 4"),
    ("pyramiddrop", {}, "llava", 3, "pyramiddrop: stages=4, but the model has 3 layers"),
    (
        "pyramiddrop",
        {"keep_ratio": 0.25},
        "llava",
        32,
        r"keep_ratio=0\.25 is the average over layers, and the first 8 of",
    ),
    ("pyramiddrop", {}, "llama", 32, "reducer 'pyramiddrop' reduces visual tokens and llama has none"),
    ("compactor", {}, "llava", 32, "'compactor' evicts the context of a language model"),
    (
        "sparsevlm",
        {"keep_ratio": 0.09},
        "llava",
        32,
        r"the first 3 of 32 layers hold every token and make 9\.38% alone",
    ),
    ("fitprune", {}, "llava", 40, r"published table is LLaVA-1\.5-7B's, of 32 layers, and this is llava of 40"),
    ("fitprune", {}, "llava_next", 32, "this is llava_next of 32; make its own: subtoken-train calibrate"),
    ("fitprune", {"keep_ratio": 0.1}, "llava", 32, r"lowest schedule of the published table has 0\.126465; raise it"),
]


@pytest.mark.parametrize(("name", "settings", "family", "layers", "words"), FIT)
def test_a_backbone_that_does_not_fit_is_refused_in_words(name, settings, family, layers, words):
    reducer = build_reducer(name, **{"keep_ratio": 0.5, **settings})
    with pytest.raises(ValueError, match=words):
        reducer.check_fit(family, sees_images=family != "llama", num_layers=layers)
