"""Every recipe says the same thing four times: in its name, its keys, its first line and the ledger."""

import re
from dataclasses import dataclass

import pytest

from subtoken_train.cli.recipe import RecipeCLI
from subtoken_train.ledger.kv_budget import KVBudget
from subtoken_train.ledger.ledger import nominal_ledger, solve_anchor
from subtoken_train.resources import read_names, recipe_text
from tests.recipes.backbones import BACKBONES, Backbone
from tests.support import places
from tests.support.sampling import cells, sampled

RECIPES = places.run_recipes()
NAME = re.compile(
    r"(?P<model>[a-z0-9]+)_"
    r"(?:lora_only|(?P<reducer>[a-z]+(?:_[a-z]+)*)(?P<keep>\d+(?:p\d+)?)"
    r"(?:_s(?P<num_groups>\d+)k(?P<kept_groups>\d+))?"
    r"(?:_(?P<selector>mlp|query|bilinear|valuenorm|outputnorm|random|static|olora))?"
    r"(?:_(?P<budget>global|ranked))?(?P<prior>_prior)?(?P<gated>_gated)?(?:_(?P<fill>mean))?"
    r"(?P<best>_best)?(?:_lf(?P<layer>\d+))?(?P<frozen>_frozen)?(?P<merged>_merged)?"
    r"(?:(?P<anchor>_anchor)|(?P<stage2>_stage2))?)"
)
PATTERN = (
    "<model>_<reducer><keep%>[_s<S>k<K>][_<selector>][_<budget>][_prior][_gated][_<fill>][_best][_lf<L>][_frozen][_merged]"
    "[_anchor|_stage2].yaml"
)
CONTEXT = ("quest", "compactor", "expected_attention", "kvzip")


@dataclass(frozen=True)
class Recipe:
    """A parsed recipe beside what its name says."""

    name: str
    words: dict[str, str | None]
    model: Backbone
    cli: RecipeCLI
    lines: list[str]

    @property
    def budget(self) -> KVBudget:
        """The budget that the name describes; an anchor's is that of the arm it is the anchor of."""
        keep = float((self.words["keep"] or "100").replace("p", ".")) / 100
        groups = int(self.words["num_groups"] or 1), int(self.words["kept_groups"] or 1)
        return KVBudget(keep, *groups, fill=self.words["fill"] or "zero")

    @property
    def kept_tokens(self) -> int:
        """Tokens of the compressed region that the recipe's own keys keep."""
        return self.cli.model.reducer_config.kept_tokens(self.model.tokens)


@pytest.fixture(scope="module", params=cells(RECIPES, every=12), ids=lambda path: path.stem)
def recipe(request) -> Recipe:
    path = request.param
    match = NAME.fullmatch(path.stem)
    assert match, f"{path.name} does not follow {PATTERN}"
    words = match.groupdict()
    if words["best"]:
        words |= {"selector": "bilinear", "prior": "_prior", "gated": "_gated", "frozen": "_frozen"}
    assert words["model"] in BACKBONES
    cli = RecipeCLI(["--config", str(path)])
    return Recipe(path.stem, words, BACKBONES[words["model"]], cli, recipe_text(path).splitlines())


def test_files_and_names_are_all_there_is():
    others = {"eval", "logging", "memory", "real", "strategy"}
    files = {path for path in RECIPES if path.exists()}
    assert {path for path in places.RECIPES.rglob("*.yaml") if path.parent.name not in others} == files
    assert {path.stem for path in RECIPES if not path.exists()} == set(read_names(places.RECIPES))
    assert {path.stem.partition("_")[0] for path in files} == set(BACKBONES)
    assert {path.name for path in places.RECIPES.iterdir() if path.is_dir()} - {"__pycache__"} == others


def test_reducer(recipe):
    words, reducer = recipe.words, recipe.cli.model.reducer_config
    if words["reducer"] is None:
        assert (reducer.name, reducer.keep_ratio) == ("none", 1)
        return
    assert reducer.name == words["reducer"]
    stages = {"none": "none", "fastv": "embeds", **dict.fromkeys(CONTEXT, "context")}
    assert reducer.stage == stages.get(reducer.name, "decoder" if reducer.staged else "tower")
    if reducer.name == "fastv":
        assert reducer.layer == int(words["layer"] or 2)
        assert reducer.frozen_scout == (words["frozen"] is not None)
    assert reducer.merges_dropped == (words["merged"] is not None)
    if words["anchor"] and reducer.staged:
        routed, held = places.recipe(recipe.name.removesuffix("_anchor")), []
        for path in (routed, places.recipe(recipe.name)):
            config = RecipeCLI(["--config", str(path)]).model
            ledger = staged_ledger(recipe.model, config.reducer_config, config.routing_config)
            held.append(ledger.bytes_of("visual", False))
        assert reducer.round_up
        assert reducer.matches == recipe.budget.keep_ratio
        shape = recipe.model.geometry
        assert 0 <= held[1] - held[0] < 2 * shape.num_layers * shape.side_bytes
    elif words["anchor"]:
        tokens = recipe.model.tokens
        share = recipe.budget.total_of(tokens)
        anchor = solve_anchor(recipe.model.geometry, tokens, share, region=recipe.model.region)
        assert reducer.round_up
        assert reducer.matches == recipe.budget.keep_ratio
        assert reducer.keep_ratio == float(share)
        assert recipe.kept_tokens == anchor.kept_tokens
    else:
        assert not reducer.round_up
        assert reducer.matches is None
        assert reducer.keep_ratio == recipe.budget.keep_ratio


def staged_ledger(model, reducer, routing):
    """The region of a prompt under a reducer that cuts at several layers."""
    depth = model.geometry.num_layers
    budget = KVBudget() if routing is None else routing.token_budget
    kept = reducer.layer_tokens(model.tokens, depth)
    return nominal_ledger(model.geometry, {model.region: model.tokens}, budget, reducer.cut_layer(depth), kept)


def assert_trained_alike(ours, theirs, keys):
    """The same data, seed, steps and trainer, and the same ``model`` groups."""
    assert ours.seed_everything == theirs.seed_everything
    assert ours.data == theirs.data
    assert {**ours.trainer, "default_root_dir": ""} == {**theirs.trainer, "default_root_dir": ""}
    for key in keys:
        assert ours.model[key] == theirs.model[key]


def test_first_line_agrees_with_the_ledger(recipe):
    summary = recipe.lines[0]
    assert summary.startswith("# ")
    routing = recipe.cli.model.routing_config
    groups = (1, 1) if routing is None else (routing.num_groups, routing.kept_groups)
    fill = "zero" if routing is None else routing.fill
    budget = KVBudget(recipe.cli.model.reducer_config.keep_ratio, *groups, fill=fill)
    tokens = {recipe.model.region: recipe.model.tokens}
    ledger = nominal_ledger(recipe.model.geometry, tokens, budget, kept_tokens=recipe.kept_tokens)
    if recipe.cli.model.reducer_config.staged:
        ledger = staged_ledger(recipe.model, recipe.cli.model.reducer_config, routing)
    figure = re.search(r"([\d.]+) % KV", summary)
    assert figure
    assert float(figure[1]) == pytest.approx(100 * ledger.fraction(), rel=1e-7)
    if counts := re.search(r"\((\d+) of (\d+)\)", summary):
        assert (int(counts[1]), int(counts[2])) == (recipe.kept_tokens, recipe.model.tokens)
    if written := re.search(r"S=(\d+), K=(\d+)", summary):
        assert (int(written[1]), int(written[2])) == groups


def test_bands_and_commands(recipe):
    text = "\n".join(recipe.lines)
    assert all(f"### {band}" in text for band in ("model", "method", "train", "dataset", "output"))
    assert f"subtoken-train fit --config recipes/{recipe.name}.yaml" in text
    assert set(re.findall(r"recipes/([\w.]+)\.yaml", text)) <= {path.stem for path in RECIPES}


@sampled("anchor", [path for path in RECIPES if path.stem.endswith("_anchor")], every=12, ids=lambda p: p.stem)
def test_an_arm_and_its_anchor_train_alike(anchor):
    """Share all but reducer, routing and folder with the routed arm: methods compare, a merged anchor too."""
    routed = places.recipe(anchor.stem.removesuffix("_anchor").removesuffix("_merged"))
    ours, theirs = (RecipeCLI(["--config", str(path)]).config for path in (anchor, routed))
    assert_trained_alike(ours, theirs, ("backbone", "lora", "optimizer", "gradient_checkpointing"))
