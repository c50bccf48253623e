"""The model card of an adapter folder: its scores, and the licence, which is the backbone's."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any, Literal

from huggingface_hub import EvalResult, ModelCardData
from jinja2 import Environment

from subtoken_train.artifact.whole_folder import PICTURE_FILE
from subtoken_train.families import FAMILIES
from subtoken_train.families.backbone_config import is_hub_id
from subtoken_train.families.load import named_family
from subtoken_train.ledger.kv_budget import KVBudget
from subtoken_train.routing.base import RoutingConfig

NATS = frozenset({"log_likelihood"})  # metrics in nats per token; all others are fractions, printed in %


@dataclass(frozen=True)
class Score:
    """The mean score of one kind of questions, a fraction or nats, and its 95 % interval."""

    kind: str  # ``all`` for all questions
    metric: str
    """``exact_match``, ``f1``, ``score`` where kinds of both are taken together, or a measure beside the score."""
    questions: int
    mean: float
    low: float
    high: float

    @property
    def cell(self) -> str:
        """Return ``60.3 [58.9, 61.7]``, see ``printed``."""
        return f"{printed(self.metric, self.mean)} {self.interval}"

    @property
    def interval(self) -> str:
        """Return ``[58.9, 61.7]``."""
        return f"[{printed(self.metric, self.low)}, {printed(self.metric, self.high)}]"


def printed(metric: str, figure: float, sign: Literal["", "+"] = "", more: int = 0) -> str:
    """Return a metric's figure as tables print it: ``60.3``, in %, or ``-0.312``, in nats."""
    return f"{figure:{sign}.{3 + more}f}" if metric in NATS else f"{100 * figure:{sign}.{1 + more}f}"


@dataclass(frozen=True)
class CardColumn:
    """One adapter's or backbone's scores; ``facts`` are short statements of its budget, by name."""

    name: str
    facts: dict[str, str]
    scores: tuple[Score, ...]


@dataclass(frozen=True)
class Evaluation:
    """Arms that answered the same questions (``digest``: their SHA-256): the card's own, and others beside it."""

    data: str
    digest: str
    own: CardColumn
    others: tuple[CardColumn, ...] = ()


def score_rows(arms: Sequence[CardColumn]) -> list[list[str]]:
    """Return a table: one column per arm, its budget, then the score of every kind of the first."""
    rows = [["", *(arm.name for arm in arms)]]
    facts = dict.fromkeys(name for arm in arms for name in arm.facts)
    rows += [[name, *(arm.facts.get(name, "") for arm in arms)] for name in facts]
    cells = [{(score.kind, score.metric): score.cell for score in arm.scores} for arm in arms]
    for score in arms[0].scores:
        row, key = f"{score.kind} ({score.questions:,}, {score.metric})", (score.kind, score.metric)
        rows.append([row, *(of_arm.get(key, "") for of_arm in cells)])
    return rows


def score_table(evaluation: Evaluation) -> str:
    """Return ``score_rows`` as Markdown."""
    head, *rows = score_rows([evaluation.own, *evaluation.others])
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


@dataclass(frozen=True)
class CardSections:
    """Optional sections of a card, besides the contents of ``subtoken_config.json``."""

    recipe: str | None = None  # the resolved recipe, YAML
    budget: str | None = None  # the ledger of one prompt, Markdown
    evaluation: Evaluation | None = None
    repo_id: str | None = None  # Hub name that it is published under
    picture: bytes | None = None  # course of the training, a PNG file


def model_card(record: dict[str, Any], sections: CardSections | None = None) -> str:
    """Return the card's Markdown from the contents of ``subtoken_config.json``, the Hub's metadata in front."""
    sections = sections or CardSections()
    routing = None if record["routing"] is None else RoutingConfig(**record["routing"])
    whole = KVBudget() if routing is None else replace(routing.token_budget, fill="zero")
    budget = replace(whole, keep_ratio=record["reducer"]["keep_ratio"])
    lora, scored = "Merged q/v LoRA" if record["merged"] else "q/v LoRA", sections.evaluation
    base = record["backbone"]["path"]
    licence = next((each.licences[base] for each in FAMILIES.values() if base in each.licences), None)
    sees_images = named_family(record["identity"]["model_type"]).sees_images
    title = str(record["training"].get("name", "subtoken adapter"))
    task = "visual-question-answering" if sees_images else "question-answering"
    metadata = ModelCardData(
        library_name="transformers" if record["merged"] else "peft",
        base_model=base if is_hub_id(base) else None,  # the Hub refuses another
        base_model_relation=("finetune" if record["merged"] else "adapter") if is_hub_id(base) else None,
        pipeline_tag="image-text-to-text" if sees_images else "text-generation",
        license=None if licence is None else licence.identifier,
        license_name=None if licence is None else licence.name,
        license_link=None if licence is None else licence.link,
        tags=["subtoken_train", "kv-cache-compression", *([] if record["merged"] else ["lora"])],
        model_name=None if scored is None else title,
        eval_results=None if scored is None else model_index(scored, task),
    )
    told = {
        "metadata": metadata.to_yaml().rstrip(),
        "title": title,
        "what": lora if routing is None else f"{lora} and value-group routers",
        "base": base,
        "plain": _plain,
        "routing": "none" if routing is None else routing_words(routing),
        "fraction": f"{budget.total_kv_fraction:.4%}",
        "picture": None if sections.picture is None else PICTURE_FILE,
        "budget": sections.budget,
        "scored": scored,
        "scores": None if scored is None else score_table(scored),
        "name": sections.repo_id or "this_folder",
        "licence": "see the backbone" if licence is None else licence.name or licence.identifier,
        "recipe": sections.recipe,
    }
    environment = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    return environment.from_string(files(__package__).joinpath("card.md.j2").read_text("utf-8")).render(record | told)


def model_index(evaluation: Evaluation, task: str) -> list[EvalResult]:
    """Return the card's own scores as the Hub's evaluation results, in %; log-likelihoods in nats per token."""
    return [
        EvalResult(
            task_type=task,
            dataset_type=evaluation.data,
            dataset_name=evaluation.data,
            dataset_revision=evaluation.digest,
            metric_type=score.metric,
            metric_name=f"{score.kind}, {score.metric} {score.interval}, 95 % interval",
            metric_value=float(printed(score.metric, score.mean, more=1)),
        )
        for score in evaluation.own.scores
    ]


def routing_words(config: RoutingConfig) -> str:
    """Describe selector, S and K, layout, budget, and what else a router was told."""
    learned = [f" of rank {config.query_rank}"] if config.selector == "bilinear" else []
    learned += [f", {key} {value}" for key, value in config.selector_options.items()]
    learned += [", query-conditioned"] * config.query_conditioned
    learned += [f", reads {' and '.join(config.features)}"] if config.features else []
    budget = f"{config.budget} budget"
    if config.budget == "delayed":
        budget = f"gates of heads, {100 * config.byte_share:.6g} % of them open in the end, delay {config.window}"
    if config.budget == "bytes":
        budget = f"keys and groups in {100 * config.byte_share:.6g} % of the bytes, pool {config.byte_pool}"
        budget += f", sinks {config.sinks}, window {config.window}"
    rest = [f"fill {config.fill}"] if config.fill != "zero" else []
    rest += [f"{config.score_prior} prior"] if config.score_prior != "none" else []
    rest += ["value gate"] * config.value_gate
    head = f"{config.words}{''.join(learned)}"
    return ", ".join([head, config.layout, budget, *rest, f"balance weight {config.balance_weight:g}"])


def _plain(settings: dict[str, Any] | None) -> str:
    """Return ``rank 8, alpha 16``; groups of settings are left out."""
    return ", ".join(f"{key} {value}" for key, value in (settings or {}).items() if not isinstance(value, dict))
