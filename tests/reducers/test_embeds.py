"""DivPrune, CDPruner, DART, EVS and VidCom2 against plain loops and the originals' choices, in every family."""

import json
import math
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from hypothesis import assume, currently_in_test_context, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from subtoken_train.datasets.datamodule import InstructionDataModule
from subtoken_train.families import FAMILIES as REGISTERED
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.load import load_family
from subtoken_train.families.qwen_vl import Qwen2VLFamily
from subtoken_train.inference.model import SubTokenModel
from subtoken_train.ledger.kv_budget import kept_count
from subtoken_train.reducers import build_reducer
from subtoken_train.reducers.base import shared_out
from subtoken_train.types import Frames, Region
from subtoken_train.view.view import View
from tests.support.golden_cases import alike
from tests.support.helpers import compress, only_sample, random_scores
from tests.support.plain_choices import by_determinants, by_max_min, by_pivots, by_relevance, cosine
from tests.support.sampling import sampled
from tests.support.tiny import noise
from tests.support.tiny.internvl import internvl_family
from tests.support.tiny.qwen import qwen2_family, qwen_video
from tests.support.truth_models import FAMILIES, TEXT, family_of, prompts

NAMES = ["divprune", "cdpruner", "dart"]
SEEING = [name for name in FAMILIES if name not in TEXT]
S, V, Q, P = (int(each) for each in (Region.SYSTEM, Region.VISUAL, Region.QUERY, Region.PADDING))


def expected(name, count, rows, asking):
    """Places among the visual rows that stay, in the order of choice."""
    if name == "divprune":
        return by_max_min(rows, count)
    if name == "cdpruner":
        return by_determinants(rows, by_relevance(rows, asking), count)
    return by_pivots(rows, rows.abs().sum(-1), [(row, row.abs().sum()) for row in asking], count)


def by_sample(batch, states):
    """(visual rows' places, their states, the question's states) of every sample that shows something."""
    places = torch.arange(batch.regions_BN.shape[1])
    for codes, last, rows in zip(batch.regions_BN, batch.rank_position_B, states, strict=True):
        visual = (codes == Region.VISUAL).nonzero()[:, 0]
        yield visual, rows[visual].float(), rows[(codes == Region.QUERY) & (places <= last)].float()


@sampled("family_name, name, pad_left", product(SEEING, NAMES, [False, True]), every=5)
def test_every_family_keeps_what_the_loops_choose_of_its_embeddings(family_name, name, pad_left):
    """Pictures of several sizes, one or two in a prompt; what stays keeps its place, and a sample is the same alone."""
    family = family_of(family_name)
    batch = prompts(family, "three", pad_left)
    backbone = compress(family, name=name, keep_ratio=0.5)
    result, own = backbone.run(batch, pad_left=pad_left), family.positions(batch)
    for i, (visual, rows, asking) in enumerate(by_sample(batch, family.embed(batch))):
        count = backbone.reducer.kept_tokens(len(visual))
        real = result.rows.visible_BM[i]
        kept = result.rows.index_BM[i, real]
        chosen = kept[batch.regions_BN[i, kept] == Region.VISUAL]
        assert chosen.tolist() == visual[expected(name, count, rows, asking)].sort().values.tolist()
        assert torch.equal(result.rows.position[..., i, real], own[..., i, kept])
        if family.in_tiles and batch.image_grid_I3 is None:  # its tiles are not told apart by the support
            continue
        alone = backbone.run(only_sample(batch, i))
        torch.testing.assert_close(alone.hidden_BMD[0], result.hidden_BMD[i, real], rtol=1e-3, atol=1e-4)


def look(embeds, codes, read=(), last=None):
    """A view of one sample without attention: asking for any is an error."""
    marks = torch.tensor([[place in read for place in range(len(codes))]])
    last = torch.tensor([len(codes) - 1 if last is None else last])
    return View(regions_BN=torch.tensor([codes]), protected_BN=marks, rank_position_B=last, hidden_BND=embeds)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_token_stays_of_any_picture_and_alike_ones_go_by_their_index(name, dtype):
    codes, reducer = [P, S, V, V, V, V, V, V, Q, Q], build_reducer(name, 0.001)
    assert reducer.select(look(random_scores(0, 1, 10, 6, dtype=dtype), codes))[0].sum() == 4
    alike = torch.ones(1, 10, 6, dtype=dtype)
    assert reducer.select(look(alike, codes))[0][0].nonzero()[:, 0].tolist() == [1, 2, 8, 9]
    assert build_reducer(name, 0.5).select(look(alike, codes))[0][0].nonzero()[:, 0].tolist() == [1, 2, 3, 4, 8, 9]
    assert reducer.select(look(random_scores(1, 1, 3, 6, dtype=dtype), [S, V, Q]))[0].all()


@pytest.mark.parametrize("name", NAMES)
def test_a_row_that_a_token_is_read_from_takes_the_place_of_the_last_choice(name):
    """Without a question, too: then CDPruner is diversity alone, and DART has pivots in the image only."""
    embeds, codes = random_scores(3, 1, 9, 6), [S, *[V] * 8]
    order = expected(name, 4, embeds[0, 1:], [])
    for read in range(8):
        keep, rank, *_ = build_reducer(name, 0.5).select(look(embeds, codes, {read + 1}))
        kept = order if read in order else [*order[:3], read]
        assert keep[0].nonzero()[:, 0].tolist() == [0, *sorted(place + 1 for place in kept)]
        if name != "dart" and read in order:
            assert [int(rank[0, place + 1]) for place in order] == [0, 1, 2, 3]


def test_cdpruner_and_dart_follow_the_question_and_never_the_answer():
    embeds, codes = random_scores(5, 1, 30, 6), [S, *[V] * 20, *[Q] * 9]
    for name in ("cdpruner", "dart"):
        reducer, answered, asked = build_reducer(name, 0.6), embeds.clone(), embeds.clone()
        answered[:, 26:] *= -3
        asked[:, 21:26] *= -3
        kept = reducer.select(look(embeds, codes, last=25))[0]
        assert torch.equal(reducer.select(look(answered, codes, last=25))[0], kept)
        assert not torch.equal(reducer.select(look(asked, codes, last=25))[0], kept)


@pytest.mark.parametrize("name", ["llava_gqa", "qwen2_5_vl"])
@pytest.mark.parametrize("layer", [1, 2])
def test_dart_in_the_decoder_reads_the_layer_below_as_transformers_computes_it(name, layer):
    """Rotated keys, and its output after the last norm."""
    family, seen = family_of(name), {}
    batch = only_sample(prompts(family, "three", pad_left=False), 1)
    backbone = compress(family, name="dart", keep_ratio=0.4, stage="decoder", layer=layer)
    rows = backbone.run(batch).spans[-1][2]
    hook = family.decoder.layers[layer - 1].register_forward_hook(lambda _m, _a, out: seen.update(out=out))
    cache = family.dense_cache()
    compress(family).run(batch, cache=cache)
    hook.remove()
    states, norms = family.decoder.norm(seen["out"])[0], cache.layers[layer - 1].keys.abs().sum((1, 3))[0]
    visual = (batch.regions_BN[0] == Region.VISUAL).nonzero()[:, 0]
    text = [(states[row], norms[row]) for row in (batch.regions_BN[0] == Region.QUERY).nonzero()[:, 0]]
    chosen = by_pivots(states[visual], norms[visual], text, backbone.reducer.kept_tokens(len(visual)))
    kept = rows.index_BM[0]
    assert kept[batch.regions_BN[0, kept] == Region.VISUAL].tolist() == visual[chosen].sort().values.tolist()


OF_VIDEOS = ["evs", "vidcom2"]
TELLING = [name for name in FAMILIES if name in REGISTERED and REGISTERED[name].tells_frames]


def by_evs(frames):
    """(frame, token) from the first that stays to the last."""
    unlike = {(0, token): math.inf for token in range(len(frames[0]))}
    for frame in range(1, len(frames)):
        for token, (now, before) in enumerate(zip(frames[frame], frames[frame - 1], strict=True)):
            unlike[frame, token] = 1 - cosine(now, before)
    return sorted(unlike, key=lambda each: (-(unlike[each] if unlike[each] > 1e-6 else 0), each))


def told(is_told):
    """What rounding decides is drawn anew, and is no fixed case."""
    if currently_in_test_context():
        assume(is_told)
    else:
        assert is_told


def by_vidcom2(frames, ratio):
    """(frame, token) from the first that stays to the last, in fp64."""
    number, tokens = frames.shape[:2]
    spread = [float(column.var(unbiased=False)) for column in frames.double().flatten(0, 1).T]
    steady = sorted(range(len(spread)), key=lambda channel: (spread[channel], channel))[: max(1, len(spread) // 2)]
    unit = torch.nn.functional.normalize(frames.double()[..., steady], dim=-1)

    def like(row, rows):
        square = float((row - rows.mean(0)).square().sum())
        return sum(math.exp(-square / (2 * 2.0**power)) for power in range(-3, 2))

    of_video = [[like(row, unit.flatten(0, 1)) for row in frame] for frame in unit]
    both = {(f, t): of_video[f][t] + like(unit[f, t], unit[f]) for f, t in product(range(number), range(tokens))}
    # two tokens are equally far from their mean: rounding alone says which is first
    told(all(more - less > 1e-6 for less, more in pairwise(sorted(both.values()))))
    weights = [-sum(own) / tokens / 0.01 for own in of_video]
    parts = [math.exp(weight - max(weights)) for weight in weights]
    inside = set()
    for f, part in enumerate(parts):
        share = min(1, ratio * (1 + part / sum(parts) - 1 / number))
        told(abs(share * tokens % 1 - 0.5) > 1e-5)  # half a token, of which fp32 and fp64 make another number
        count = min(tokens, max(1, round(share * tokens)))
        inside |= set(sorted(((f, t) for t in range(tokens)), key=lambda each: (both[each], each))[:count])
    return sorted(both, key=lambda each: (each not in inside, both[each], each))


def video_order(name, frames, ratio):
    """Indices of the tokens in the order in which they stay."""
    order = by_evs(frames) if name == "evs" else by_vidcom2(frames, ratio)
    return [frame * frames.shape[1] + token for frame, token in order]


@pytest.mark.parametrize("name", OF_VIDEOS)
@settings(max_examples=30, deadline=None)
@given(sizes=st.tuples(st.integers(1, 5), st.integers(1, 6)), ratio=st.floats(0.05, 1), seed=st.integers(0, 10_000))
def test_the_order_is_that_of_the_loops(name, sizes, ratio, seed):
    frames = random_scores(seed, *sizes, 8)
    assert build_reducer(name, ratio).order(frames).tolist() == video_order(name, frames, ratio)


ROOT = Path(__file__).resolve().parents[2]
ORIGINALS = ROOT / "benchmarks" / "results" / "pruner_originals.safetensors"


@pytest.mark.parametrize("case", ["evs", "vidcom2", "vidcom2_vllm"])
def test_what_stays_is_the_originals_choice(case):
    """vLLM's counts are exact, too; those of VidCom2's own code are rounded frame by frame."""
    features, kept, ratios = (load_file(ORIGINALS)[f"{case}.{name}"] for name in ("features", "kept", "ratios"))
    name, ours = case.partition("_")[0], torch.zeros_like(kept)
    for marks, golden, ratio in zip(ours, kept, ratios.tolist(), strict=True):
        reducer, count = build_reducer(name, ratio), int(golden.sum())
        assert case == "vidcom2" or reducer.kept_tokens(len(golden)) == count
        marks[reducer.order(features.view(6, 20, -1))[:count]] = True
    alike(name, f"pruner_originals {case}", ours, kept)


def video_view(embeds, codes, videos, read=()):
    """A view of one sample; asking for attention is an error."""
    marks = torch.tensor([[place in read for place in range(len(codes))]])
    return View(regions_BN=torch.tensor([codes]), protected_BN=marks, hidden_BND=embeds, videos=lambda: [videos])


@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=5), thousandths=st.integers(1, 1000))
def test_shares_are_exact_within_one_but_for_what_the_last_is_left(sizes, thousandths):
    kept = kept_count(sum(sizes), thousandths / 1000, False)
    counts, exact = shared_out(sizes, kept), [kept * size / sum(sizes) for size in sizes]
    assert sum(counts) == kept
    assert counts[-1] >= 1
    apart = [abs(count - share) for count, share in zip(counts, exact, strict=True)]
    assert all(each <= (1 if exact[-1] >= 0.5 else 2) for each in apart)


@pytest.mark.parametrize("name", OF_VIDEOS)
@settings(max_examples=40, deadline=None)
@given(
    videos=st.lists(st.builds(Frames, st.integers(1, 4), st.integers(1, 5), st.integers(0, 1)), max_size=3),
    thousandths=st.integers(1, 1000),
    round_up=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_counts_are_exact_and_each_video_keeps_its_share(name, videos, thousandths, round_up, seed):
    """Padding on both sides, words between the videos, alike frames, one frame, one token."""
    ratio, codes, places = thousandths / 1000, [P, S], []
    for video in videos:
        places.append(list(range(len(codes), len(codes) + video.total)))
        codes += [V] * video.total + [Q]
    reducer = build_reducer(name, ratio, round_up)
    keep = reducer.select(video_view(random_scores(seed, 1, len(codes) + 1, 4, levels=2), [*codes, P], videos))[0][0]
    total = sum(video.total for video in videos)
    counts = shared_out([video.total for video in videos], kept_count(total, ratio, round_up))
    assert int(keep[torch.tensor([*codes, P]) == V].sum()) == kept_count(total, ratio, round_up) * bool(total)
    assert keep.tolist()[0 :: len(codes)] == [False, False]
    assert all(keep[place] for place, code in enumerate(codes) if code in (S, Q))
    for video, rows, count in zip(videos, places, counts if videos else [], strict=True):
        kept = int(keep[rows].sum())
        assert kept == count
        assert not video.after or keep[rows[-1]] == (kept > 1)


@pytest.mark.parametrize("name", OF_VIDEOS)
def test_ties_go_to_the_lower_index(name):
    alike_rows, videos = torch.ones(1, 8, 4), [Frames(3, 2)]
    keep = build_reducer(name, 0.5).select(video_view(alike_rows, [S, *[V] * 6, Q], videos))[0]
    kept = {"evs": [1, 2, 3], "vidcom2": [1, 3, 5]}[name]  # VidCom2: of every frame as many
    assert keep[0].nonzero()[:, 0].tolist() == [0, *kept, 7]


@pytest.mark.parametrize("name", OF_VIDEOS)
def test_a_row_of_a_video_that_a_token_is_read_from_takes_the_place_of_the_last_choice(name):
    embeds, codes = random_scores(3, 1, 13, 6), [S, *[V] * 12]
    order = video_order(name, embeds[0, 1:].view(3, 4, 6), 0.5)
    keep = build_reducer(name, 0.5).select(video_view(embeds, codes, [Frames(3, 4)], {12}))[0]
    kept = order[:6] if 11 in order[:6] else [*order[:5], 11]
    assert keep[0].nonzero()[:, 0].tolist() == [0, *sorted(place + 1 for place in kept)]


@sampled("family_name, name, pad_left", product(TELLING, OF_VIDEOS, [False, True]), every=4)
def test_every_family_keeps_what_the_loops_choose_of_its_videos(family_name, name, pad_left):
    """One or two videos in a prompt, or none; what stays keeps its place, and a sample is the same alone."""
    family = family_of(family_name)
    batch = prompts(family, "text", pad_left, videos=True)
    backbone = compress(family, name=name, keep_ratio=0.55)
    result, own, embeds = backbone.run(batch, pad_left=pad_left), family.positions(batch), family.embed(batch)
    for i, videos in enumerate(family.video_frames(batch)):
        visual = (batch.regions_BN[i] == Region.VISUAL).nonzero()[:, 0]
        real = result.rows.visible_BM[i]
        kept = result.rows.index_BM[i, real]
        wanted: list[int] = []
        for video, rows in zip(videos, visual.chunk(max(1, len(videos))), strict=False):
            number, tokens, after = video
            frames = embeds[i, rows[: number * tokens]].view(number, tokens, -1)
            count = backbone.reducer.kept_tokens(len(visual)) // len(videos)
            wanted += rows[video_order(name, frames, 0.55)[: count - after]].tolist()
            wanted += rows[len(rows) - after :].tolist()
        chosen = kept[batch.regions_BN[i, kept] == Region.VISUAL].tolist()
        assert len(chosen) == (backbone.reducer.kept_tokens(len(visual)) if len(visual) else 0)
        assert set(wanted) <= set(chosen)
        assert len(chosen) - len(wanted) < 2  # what two videos do not share evenly
        assert torch.equal(result.rows.position[..., i, real], own[..., i, kept])
        alone = backbone.run(only_sample(batch, i))
        torch.testing.assert_close(alone.hidden_BMD[0], result.hidden_BMD[i, real], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", OF_VIDEOS)
def test_it_answers_about_videos_and_refuses_images(name):
    model = SubTokenModel.around(compress(qwen2_family(), name=name, keep_ratio=0.5))
    video = qwen_video(5)
    given = model.inputs("<video> where is the 7 ?", [video])
    assert model.generate(**given, max_new_tokens=3).shape[1] > given["input_ids"].shape[1]
    mixed = model.inputs("<video> and <image> ?", [video, noise(60, 90)])
    with pytest.raises(ValueError, match=r"shows an image, and its reducer chooses among the frames of videos; leave"):
        model.generate(**mixed, max_new_tokens=3)


def test_families_and_data_that_do_not_fit_are_refused(tmp_path):
    for family, why in ((family_of("llava"), "takes no videos"), (internvl_family(), "does not tell the frames of a")):
        with pytest.raises(ValueError, match=rf"reducer 'evs' chooses among the frames of videos, and \w+ {why}"):
            compress(family, name="evs", keep_ratio=0.5)
    with pytest.raises(ValueError, match="llava takes no videos"):
        load_family(BackboneConfig(str(ROOT / "checkpoints" / "tiny-llava")), build_reducer("vidcom2", 0.5))
    with pytest.raises(ValueError, match="reduces visual tokens and a language model has none"):
        compress(family_of("llama"), name="vidcom2", keep_ratio=0.5)
    turns = [{"from": "human", "value": "<image>\nwho?"}, {"from": "gpt", "value": "me"}]
    (tmp_path / "train.json").write_text(json.dumps([{"id": "one", "image": "1.png", "conversations": turns}]))
    data = InstructionDataModule(str(tmp_path / "train.json"))
    data.read()
    with pytest.raises(ValueError, match=r"train.json: record 'one' shows an image, and its reducer chooses among"):
        data.check_images(Qwen2VLFamily, build_reducer("evs", 0.5))
