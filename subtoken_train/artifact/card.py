"""The model card of an adapter folder: its scores, and the licence, which is the backbone's."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from huggingface_hub import EvalResult, ModelCardData
from jinja2 import Environment

from subtoken_train.artifact.whole_folder import PICTURE_FILE
from subtoken_train.families import FAMILIES
from subtoken_train.families.backbone_config import is_hub_id
from subtoken_train.families.load import named_family
from subtoken_train.ledger.kv_budget import KVBudget
from subtoken_train.routing.base import POOLS
from subtoken_train.types import Licence

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


_CARD = """---
{{ metadata }}
---

# {{ title }}

{{ what }} for `{{ base }}`, trained with subtoken_train under the token reducer it is meant to run with.
{%- if stage2 %}


Trained in two stages: first the q/v LoRA, token-only ({{ plain(training.stage1) or "not recorded" }}); then, with it \
frozen, the {{ "routers and a LoRA on `o_proj`" if stage2.output_lora else "routers" }}.
{%- endif %}


| setting | value |
|---|---|
| token reducer | {{ reducer.name }}, keep ratio {{ reducer.keep_ratio }}
{{- ", ranked by the base weights" if reducer.ranking == "frozen" }} |
| routing | {{ routing }} |
| LoRA on q and v | {{ plain(lora) }} |
{% if stage2 and stage2.output_lora %}
| LoRA on o_proj | {{ plain(stage2.output_lora) }} |
{% endif %}
| nominal KV of the routed region | {{ fraction }} |
| training | {{ plain(training) or "not recorded" }}
{{- "; a loss of its own (%s)" % plain(training.loss) if training.loss is mapping }}
{%- set teacher = training.distillation %}
{{- "; distilled from the uncompressed backbone (%s)" % plain(teacher) if teacher is mapping }} |
{% if picture %}

## Training

![The course of the training]({{ picture }})

Drawn from the run's log when it ended.
{% endif %}
{% if budget %}

## KV budget

{{ budget }}
{% endif %}
{% if scored %}

## Scores

Greedy answers to `{{ scored.data }}` (SHA-256 {{ scored.digest[:12] }}), mean score in % with its 95 % \
bootstrap interval over the questions.

{{ scores }}
{% endif %}

Which setting to take at equal bytes is measured on the project's embedded models, in its `docs/choosing.md`: what
beats its token-only anchor and trained selection by value norm there, and where nothing does.

## How to load

{% for each in packages %}
Install `{{ each.requirement }}` first, which brings its {{ each.kind }} `{{ each.name }}`.

{% endfor %}
```python
from subtoken_train import SubTokenModel

model = SubTokenModel.from_pretrained("{{ name }}")  # the backbone is named in it
model.chat("what is this?", [image], max_new_tokens=64)
print(model.cache_report())
```

    subtoken-train evaluate --adapter {{ name }} --data questions.json

{% if merged %}
The LoRA is merged into the backbone's weights: transformers' `from_pretrained` loads the folder as an
ordinary model, without token reducer and routers, which need subtoken_train.
{% else %}
`PeftModel.from_pretrained(backbone, "{{ name }}")` loads the LoRA alone
{%- if stage2 and stage2.output_lora %}; for the one on `o_proj` as well, follow it by
`load_adapter("{{ name }}", "output", subfolder="output")` and `base_model.set_adapter(["default", "output"])`
{%- endif %}.
{% endif %}

## Licence

The adapter falls under the licence of its backbone: {{ licence }}.
{% if recipe %}

## Recipe

Saved as `recipe.yaml`; `subtoken-train fit --config recipe.yaml` trains it again.

```yaml
{{ recipe.strip() }}
```
{% endif %}
"""


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
    groups = record["routing"] or {"num_groups": 1, "kept_groups": 1}
    sizes = (groups["num_groups"], groups["kept_groups"])
    budget = KVBudget(record["reducer"]["keep_ratio"], *sizes, byte_share=groups.get("byte_share", 1.0))
    lora, scored = "Merged q/v LoRA" if record["merged"] else "q/v LoRA", sections.evaluation
    licence, base = _licence(record["backbone"]["path"]), record["backbone"]["path"]
    told = {
        "metadata": _metadata(record, sections).to_yaml().rstrip(),
        "title": _title(record),
        "what": lora if record["routing"] is None else f"{lora} and value-group routers",
        "base": base,
        "plain": _plain,
        "routing": "none" if record["routing"] is None else _routing_words(record["routing"]),
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
    return environment.from_string(_CARD).render(record | told)


def _metadata(record: dict[str, Any], sections: CardSections) -> ModelCardData:
    """Return the Hub's metadata; a backbone that is no Hub id is left out, because the Hub refuses it."""
    base, merged, scored = record["backbone"]["path"], record["merged"], sections.evaluation
    licence = _licence(base)
    sees_images = named_family(record["identity"]["model_type"]).sees_images
    tags = ["subtoken_train", "kv-cache-compression"]
    task = "visual-question-answering" if sees_images else "question-answering"
    return ModelCardData(
        library_name="transformers" if merged else "peft",
        base_model=base if is_hub_id(base) else None,
        base_model_relation=("finetune" if merged else "adapter") if is_hub_id(base) else None,
        pipeline_tag="image-text-to-text" if sees_images else "text-generation",
        license=None if licence is None else licence.identifier,
        license_name=None if licence is None else licence.name,
        license_link=None if licence is None else licence.link,
        tags=tags if merged else [*tags, "lora"],
        model_name=None if scored is None else _title(record),
        eval_results=None if scored is None else model_index(scored, task),
    )


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


def _title(record: dict[str, Any]) -> str:
    return str(record["training"].get("name", "subtoken adapter"))


def _routing_words(routing: dict[str, Any]) -> str:
    """Describe selector, S, K and further settings; older records lack the later ones."""
    parts = [f"S{routing['num_groups']}K{routing['kept_groups']} {routing['selector']}"]
    if (budget := routing.get("budget", "per_token")) == "bytes":
        parts.append(f"keys and groups in {routing['byte_share']:.4%} of the bytes of {POOLS[routing['byte_pool']]}")
    elif budget == "delayed":
        share, delay = f"{routing['byte_share']:.4%}", routing["window"]
        parts = [f"gates {routing['selector']}, trained to leave {share} of them open, delay {delay} tokens"]
    elif budget != "per_token":
        parts.append(f"{budget} budget")
    if (prior := routing.get("score_prior", "none")) != "none":
        parts.append(f"{prior} prior")
    parts += [f"{key} {value}" for key, value in routing.get("selector_options", {}).items()]
    parts += ["value gate"] if routing.get("value_gate") else []
    parts += [f"reads {name}" for name in routing.get("features", ())]
    if (fill := routing.get("fill", "zero")) != "zero":
        beside = " (a value vector per layer and sample, beside the nominal KV)" if fill == "mean" else ""
        parts.append(f"fill {fill}{beside}")
    return ", ".join(parts)


def _plain(settings: dict[str, Any] | None) -> str:
    """Return ``rank 8, alpha 16``; groups of settings are left out."""
    return ", ".join(f"{key} {value}" for key, value in (settings or {}).items() if not isinstance(value, dict))


def _licence(backbone: str) -> Licence | None:
    """Return the licence of a backbone that a family knows by name; ask the backbone for others."""
    return next((each.licences[backbone] for each in FAMILIES.values() if backbone in each.licences), None)
