"""Three models on one loaded backbone: each answers as it does alone, streams, is drawn, and can be stopped."""

import re
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image

from subtoken_train.cli.main import main
from subtoken_train.demo import drawings
from subtoken_train.demo.side_by_side import SideBySide
from subtoken_train.inference.model import SubTokenModel
from subtoken_train.resources import resource
from subtoken_train.types import LayerPlan, Plan, Region
from tests.support.places import real_folder
from tests.support.refusals import refuses

ROUTED = str(resource("checkpoints/adapters/tiny_fastv25_s16k4"))
ANCHOR = f"{ROUTED}_anchor"


@pytest.fixture(scope="module")
def models():
    return SideBySide(ROUTED, ANCHOR, device="cpu")


@pytest.fixture(scope="module")
def asked():
    path, question = drawings.presets()[2]
    return Image.open(path).convert("RGB"), question


TEXT, QUESTION = drawings.presets(pictures=False)[0]


@pytest.fixture(scope="module")
def readers():
    return SideBySide(backbone="checkpoints/tiny-llama", device="cpu")


def last_words(spoken):
    return {each.place: each.text for each in spoken}


@pytest.mark.slow
def test_each_side_answers_as_it_does_alone(models, asked):
    image, question = asked
    spoken = list(models.ask(image, question, None, "0.5"))
    answers = [each.answer for each in spoken if each.answer]
    assert [answer.title for answer in answers] == ["backbone", "anchor", "routed model"]
    for place, path in enumerate(("checkpoints/tiny-llava", ANCHOR, ROUTED)):
        alone = SubTokenModel.from_pretrained(path)
        assert last_words(spoken)[place] == alone.chat(question, [image])
        assert answers[place].report == alone.cache_report()
    assert models._family is answers[0].family is answers[2].family  # one backbone in memory
    found = re.findall('<td data-name="(.*?)">(.*?)</td>', drawings.facts_table(answers))
    assert [name for name, _ in found] == list(drawings.COLUMNS) * 3
    cells = [
        [text for _, text in found[start : start + len(drawings.COLUMNS)]]
        for start in range(0, len(found), len(drawings.COLUMNS))
    ]
    assert [row[1] for row in cells] == ["-", "fastv 0.15625", "fastv 0.25, S16K4 linear"]
    assert [row[4] for row in cells] == ["100.000%", "15.625%", "15.625%"]
    held = answers[2].report.total_bytes - answers[2].report.slack_bytes
    assert (cells[2][2], cells[2][9]) == (f"{held:,}", str(answers[2].tokens))


def test_the_first_example_tells_the_models_apart_and_sixteen_visitors_each_have_their_own(models):
    path, first = drawings.presets()[0]
    image = Image.open(path).convert("RGB")
    assert last_words(models.ask(image, first, None, "0.5")) == {0: "yellow 7", 1: "white 8", 2: "yellow 7"}
    questions = [f"what is at {column}{row} ?" for column in "ABCD" for row in range(1, 5)]
    with ThreadPoolExecutor(16) as visitors:
        told = list(visitors.map(lambda each: last_words(models.ask(image, each, None, "0.5"))[0], questions))
    whole = SubTokenModel.from_pretrained("checkpoints/tiny-llava")
    assert told == [whole.chat(each, [image]) for each in questions]


def test_answers_grow_as_they_are_made_and_an_asker_may_leave(models, asked):
    leaving = models.ask(*asked, None, "0.5")
    assert next(leaving).place == 0
    leaving.close()
    texts = [each.text for each in models.ask(*asked, None, "0.5") if each.place == 2]
    assert texts[-1] == "white 4"
    assert {"white", "white 4"} <= {text.strip() for text in texts}  # transformers before 5.24 has '' before them
    assert all(texts[-1].startswith(text.strip()) for text in texts)


def test_an_eviction_spares_the_backbone(models, asked):
    answers = [each.answer for each in models.ask(*asked, "snapkv", "0.5") if each.answer]
    methods = ["-", "fastv 0.15625, snapkv 0.5", "fastv 0.25, S16K4 linear, snapkv 0.5"]
    assert [answer.method for answer in answers] == methods
    assert answers[0].report.realised_fraction == 1
    assert answers[2].report.realised_fraction < 0.6 * answers[2].report.nominal_fraction


def test_refusals_are_words_and_the_next_question_is_answered(models, asked, tmp_path):
    (tmp_path / "made.json").write_text("{}")
    no_file = "eviction_keep of this page reads no file; write threshold:-4"
    for question, eviction, keep, words in (
        ("  ", None, "0.5", "^the prompt is empty"),
        ("is there a 7 ?", "snpakv", "0.5", "unknown eviction method 'snpakv'. Did you mean 'snapkv'?"),
        ("is there a 7 ?", "snapkv", "", "'' is not a budget; write a fraction"),
        ("is there a 7 ?", "snapkv", "10B", "^anchor: eviction_keep=10 bytes is too small for"),
        ("is there a 7 ?", "keydiff", f"threshold:{tmp_path / 'made.json'}", no_file),
    ):
        refuses(words, list, models.ask(asked[0], question, eviction, keep))
    assert last_words(models.ask(*asked, None, "0.5"))[2] == "white 4"


def test_merged_weights_are_their_own_backbone(tmp_path, vlm_adapter, asked):
    assert main(["export", str(vlm_adapter), str(tmp_path / "merged"), "--merge-lora"]) == 0
    merged = SideBySide(str(tmp_path / "merged"), device="cpu")
    whole, routed = (each.answer for each in merged.ask(*asked, None, "1") if each.answer)
    assert (whole.method, whole.report.realised_fraction) == ("-", 1)
    assert routed.method != "-"
    assert routed.report.realised_fraction < 1


def test_what_cannot_be_shown_is_refused_before_weights_are_read(monkeypatch, tmp_path, vlm_adapter):
    monkeypatch.setattr("subtoken_train.inference.pool.load_family", lambda *args: pytest.fail("weights were read"))
    text = str(resource("checkpoints/adapters/tinylm_lora_only"))
    for given, words in (
        (("nowhere", None), "nowhere is not an adapter folder"),
        ((ROUTED, "nowhere"), "nowhere is not an adapter folder"),
        ((ROUTED, str(vlm_adapter)), r"are not on one backbone \(path .*tiny-llava and .*backbone\); use an anchor"),
        ((ROUTED, text), r"are not on one backbone \(path .*tiny-llava and .*tiny-llama\)"),
        ((), "name an adapter"),
        ((None, ANCHOR, "checkpoints/tiny-llama"), "needs --adapter DIR to compare with"),
        ((None, None, ROUTED), "is an adapter; write --adapter"),
    ):
        refuses(words, SideBySide, *given)


def test_one_backbone_by_two_paths(tmp_path, monkeypatch):
    """Written otherwise, it is the same one."""
    copy = shutil.copytree(ANCHOR, tmp_path / "anchor")
    for config in (copy / "subtoken_config.json", copy / "adapter_config.json"):
        text = config.read_text()
        config.write_text(text.replace('"checkpoints/tiny-llava"', f'"{resource("checkpoints/tiny-llava")}"'))
    assert len(SideBySide(ROUTED, str(copy), device="cpu").sides) == 3


REGIONS = torch.tensor([Region.SYSTEM, Region.VISUAL, Region.VISUAL, Region.VISUAL, Region.QUERY])


def test_groups_are_those_of_kept_visual_tokens():
    masks = torch.tensor([[[1, 1], [1, 0], [1, 1], [1, 1], [0, 0]]]).bool()
    routed = LayerPlan(torch.tensor([[0, 1, 3, 4, -1]]), masks)
    whole, none = LayerPlan(torch.tensor([[0, 1, 2, 3, 4]])), LayerPlan(torch.tensor([[0, 4]]))
    kept = drawings.kept_groups(Plan([whole, routed, none]), REGIONS)
    assert kept.shares_LS.tolist() == [[1, 1], [1, 0.5], [0, 0]]
    assert [marks.tolist() for marks in kept.marks_nS] == [[[True, True]] * 3, [[True, False], [True, True]], []]
    assert drawings.kept_groups(Plan([whole, none]), REGIONS) is None
    assert kept.keys == 0
    heads = torch.tensor([[[1], [0], [1], [1], [0]]]).bool()
    one = drawings.kept_groups(Plan([LayerPlan(routed.entries_BN, masks, heads), routed]), REGIONS)
    assert one.keys == 1
    assert [marks.tolist() for marks in one.marks_nS] == [
        [[False, True, False], [True, True, True]],
        [[True, True, False], [True, True, True]],
    ]


def test_pictures_follow_the_layer():
    path, question = drawings.presets()[1]
    spoken = SideBySide(ROUTED, device="cpu").ask(Image.open(path).convert("RGB"), question, None, "1")
    whole, routed = (each.answer for each in spoken if each.answer)
    drawn = [np.array(drawings.token_picture(routed, layer)) for layer in (0, 5)]
    assert drawn[0].shape == drawn[1].shape
    assert (drawn[0] != drawn[1]).any()
    assert (np.array(drawings.token_picture(whole, 5)) != drawn[1]).any()
    groups = [[np.array(each) for each in drawings.group_pictures(routed, layer)] for layer in (0, 5)]
    assert (groups[0][1] != groups[1][1]).any()
    assert drawings.group_pictures(whole, 0) == []
    assert np.array(drawings.token_picture(routed, 5, dark=True))[0, 0].max() < 50 < drawn[1][0, 0].min()


@pytest.mark.slow
def test_the_first_text_tells_the_caches_apart():
    spoken = SideBySide(backbone=str(real_folder("smollm2")), device="cpu").ask(
        TEXT, QUESTION, "kvzip", "0.25", raw=True
    )
    assert [text.split()[0] for text in last_words(spoken).values()] == ["cello", "cello", "role"]


@pytest.mark.filterwarnings("ignore:eviction 'kvzip' runs further rows")
def test_a_text_is_compressed_before_its_question_is_seen(readers):
    spoken = list(readers.ask(TEXT, QUESTION, "kvzip", "0.2", "int8"))
    whole, compressed, rival = answers = [each.answer for each in spoken if each.answer]
    small = {"eviction_keep": 0.2, "kv_dtype": "int8"}
    sides = {"backbone -": {}} | {
        f"{title} {name} 0.2 int8": {"eviction": name, **small}
        for title, name in (("compressed", "kvzip"), ("SnapKV", "snapkv"))
    }
    assert [f"{answer.title} {answer.method}" for answer in answers] == list(sides)
    for place, (answer, settings) in enumerate(zip(answers, sides.values(), strict=True)):
        alone = SubTokenModel.from_pretrained("checkpoints/tiny-llama", **settings)
        assert last_words(spoken)[place] == alone.ask(TEXT, [QUESTION])[0]
        assert answer.report.realised_fraction == alone.cache_report().realised_fraction
        assert answer.tokens > 0
    assert rival.report.total_bytes == pytest.approx(compressed.report.total_bytes, rel=0.001)
    assert compressed.report.total_bytes < whole.report.total_bytes / 3


def test_words_of_a_text_say_how_many_heads_keep_them(readers):
    whole, compressed, _ = (each.answer for each in readers.ask(TEXT, QUESTION, "kvzip", "0.2") if each.answer)
    for answer in (whole, compressed):
        words = drawings.token_words(answer, 0)
        assert TEXT.strip() in "".join(piece for piece, _ in words)
        assert drawings.token_picture(answer, 0) is None
        assert drawings.marked_text(answer, 0).count("</span>") == len(words)
    assert {share for _, share in drawings.token_words(whole, 0)} == {1}
    layers = [[share for _, share in drawings.token_words(compressed, layer)] for layer in range(readers.num_layers)]
    assert all(0 <= share <= 1 for shares in layers for share in shares)
    assert np.mean(layers) == pytest.approx(0.2, abs=0.02)  # one budget for all layers and heads


def test_half_a_character_is_no_word(readers):
    answer = next(each.answer for each in readers.ask("Grüße an 東京. " * 3, QUESTION, None, "0.5") if each.answer)
    words = [piece for piece, _ in drawings.token_words(answer, 0)]
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(words)
    assert "Grüße an 東京." in "".join(words)


def test_a_router_that_reads_the_question_has_it_in_the_prompt(text_adapter):
    routed = SideBySide(str(text_adapter), device="cpu")
    answers = [each.answer for each in routed.ask(TEXT, QUESTION, None, "0.5") if each.answer]
    assert [answer.title for answer in answers] == ["backbone", "routed model"]
    assert [each.width for each in drawings.group_pictures(answers[1], 0)] == [520, 520]
    assert sum(share for _, share in drawings.token_words(answers[1], 1)) < len(drawings.token_words(answers[1], 1))


def test_a_text_that_is_refused(readers):
    long = "the text has [0-9,]+ tokens, and the model was made for"
    empty = "text or question is empty"
    for about, question, words in ((" ", QUESTION, empty), (TEXT, "", empty), ("word " * 5000, QUESTION, long)):
        refuses(words, list, readers.ask(about, question, None, "0.5"))
