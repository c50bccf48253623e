"""A saved cache, for tests of its file; and a real model."""

import pytest


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    from tests.inference.test_asking import QUESTIONS, TEXTS, asking
    from tests.support.generation_cells import PLAIN

    model = asking(family="llama", **{**PLAIN, "eviction": "h2o"})
    answers = model.ask(TEXTS[0], QUESTIONS, max_new_tokens=4)
    return model, answers, model.cache.save(tmp_path_factory.mktemp("saved") / "cache.safetensors")


@pytest.fixture(scope="module")
def smollm2():
    from tests.support.places import real_model

    return real_model("smollm2")
