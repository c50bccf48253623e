"""Which page the card of an eviction, a wrapper or a reducer stands on: every name in one kind, and every kind a page.

A kind is what a reader knows of a method before reading its card. A new method is one more name here.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """Methods whose cards stand on one page.

    Attributes:
        page: the page, from ``docs/``.
        title: its heading.
        words: what the methods have in common.
        when: when to take one of them.
        names: the methods.
    """

    page: str
    title: str
    words: str
    when: str
    names: tuple[str, ...]


EVICTION_KINDS = (
    Kind(
        "evictions/visual.md",
        "Evictions made for pictures",
        "They treat a picture's entries and text differently: text says which entries of the picture matter, and "
        "itself goes last or not at all.",
        "Prompts with pictures whose question is known.",
        ("aircache", "look_m", "meda", "tgv_kv", "vl_cache"),
    ),
    Kind(
        "evictions/attention.md",
        "Evictions by attention",
        "An entry stays by the attention that it gets: from all rows of the prompt, from its last ones, from the "
        "question, or, under `quest_steps`, from each step of decoding. Every layer has the same budget.",
        "The question is known when the prompt is read, and one pass must do.",
        ("elastic", "finch", "h2o", "quest_steps", "rkv", "snapkv", "tova"),
    ),
    Kind(
        "evictions/layers.md",
        "Evictions that give layers different budgets",
        "Attention, or the place in the prompt, decides which entries stay, and each layer decides how many, "
        "within one budget.",
        "As above, where layers differ: deep models and small budgets.",
        ("cake", "prefixkv", "pyramidkv", "simlayerkv"),
    ),
    Kind(
        "evictions/heads.md",
        "Evictions that tell heads apart",
        "Some heads fetch what an answer needs, others look at the last few entries. `calibrate` finds which do what "
        "in a backbone, and those that fetch keep more.",
        "One backbone for a long time: it is calibrated once.",
        ("duo_attention", "headkv", "sparsemm"),
    ),
    Kind(
        "evictions/repeating.md",
        "Evictions that let the model repeat the context",
        "An entry stays by the attention that it gets while the context runs a second time (under `kvcompose` only "
        "where there is no question); `kvzap` predicts that in one pass.",
        "A context that is asked again and again, or the least loss: [measured](choosing.md).",
        ("kvcompose", "kvgrad", "kvzap", "kvzip"),
    ),
    Kind(
        "evictions/keys.md",
        "Evictions that read no attention",
        "Keys, values and positions decide, and chance in the control; attention that is computed here is expected or "
        "local, never that of the prompt's rows. Whether the question is there changes nothing.",
        "The question comes later, and prompts are read in chunks.",
        (
            *("capkv", "compactor", "cur", "expected_attention", "keydiff", "knorm", "lagkv", "q_filter", "random"),
            *("streaming_llm", "triattention"),
        ),
    ),
)
WRAPPER_KIND = Kind(
    "evictions/wrappers.md",
    "Wrappers around evictions",
    "A wrapper is written around a method, or around another wrapper, and changes how its scores are spent: "
    "`ada(critical(expected_attention))`.",
    "Heads or layers should share one budget; `pooled` is the widest.",
    ("ada", "chunk", "critical", "lkv", "per_layer", "pooled"),
)
VISUAL_KINDS = (
    Kind(
        "reducers/tower.md",
        "Reducers in the vision tower",
        "The tower's own attention decides which visual tokens reach the language model.",
        "Fastest: the language model never sees what goes.",
        ("fastervlm", "prumerge", "prunesid", "visionzip", "vispruner"),
    ),
    Kind(
        "reducers/embeds.md",
        "Reducers of the input",
        "The input is shortened before layer 0, so that every layer saves; `dart` and `fastv` may cut between layers "
        "instead. The controls, and `none`, stand here too.",
        "All families; `fastv` is what the paper trains under.",
        ("cdpruner", "dart", "divprune", "fastv", "none", "random", "uniform"),
    ),
    Kind(
        "reducers/decoder.md",
        "Reducers between layers",
        "Visual tokens leave on the way through the language model: early layers see more of them than late ones.",
        "Early layers need the whole picture.",
        ("fitprune", "pyramiddrop", "sparsevlm"),
    ),
    Kind(
        "reducers/videos.md",
        "Reducers of videos",
        "They choose among the tokens of a video's frames; a family that takes no videos has none of them.",
        "Videos.",
        ("evs", "vidcom2"),
    ),
)
CONTEXT_KIND = Kind(
    "reducers/context.md",
    "Reducers of a text's context",
    "For language models: what stands before the question is shortened, in every layer.",
    "Routers of a language model are trained under it.",
    ("quest",),
)
REDUCER_KINDS = (*VISUAL_KINDS, CONTEXT_KIND)


def page_of(name: str, kinds: tuple[Kind, ...]) -> str:
    """Return the page that a method's card stands on, from ``docs/``."""
    pages = [kind.page for kind in kinds if name in kind.names]
    if len(pages) != 1:
        found = " and ".join(pages) or "no page"
        raise ValueError(f"the card of {name!r} is on {found}; name it in one kind of docs/making/kinds.py")
    return pages[0]
