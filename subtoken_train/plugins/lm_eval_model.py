"""The model ``subtoken`` of lm-evaluation-harness (0.4.12 or newer): importing this module registers it.

Tokenisation, truncation and rolling windows are those of the harness's own ``hf`` model, so that an uncompressed run
gives its scores. Answers are greedy; there is one process.
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, ClassVar, Self

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, simple_parse_args_string
from tqdm import tqdm

from subtoken_train.datasets.text_batches import context_tokens
from subtoken_train.errors import MAX_TOKENS, refuse
from subtoken_train.families.chat_template import filled_template
from subtoken_train.families.positions import position_bound
from subtoken_train.inference.model import SubTokenModel
from subtoken_train.inference.text_prompts import EncodedText, text_batch
from subtoken_train.plugins.harness import Runner, Scored, greedy_settings, read_arguments
from subtoken_train.types import Batch

ANSWER_TOKENS = 256
"""Tokens of a generated answer if the task names no number, as in the harness."""

SETTINGS = "subtoken settings"
"""Key under which a file of finished requests names the model that answered."""

log = logging.getLogger(__name__)


@register_model("subtoken")
class SubTokenLM(TemplateLM):  # type: ignore[misc]  # the harness is untyped
    """An adapter or a language model, its cache compressed; ``given`` are ``model_args`` (``ModelArguments``)."""

    last: "ClassVar[SubTokenLM | None]" = None
    """The model that was made last."""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.arguments = read_arguments(given)
        model = self.arguments.model()
        self.family = model.backbone.family
        if self.family.image_token_id is not None:
            name = self.family.name
            raise ValueError(f"{name} sees images, and text tasks have none; use a language model, or lmms-eval")
        self.tokenizer = self.family.tokenizer
        self.runner = Runner[tuple[int, ...]](model, self.arguments, self._collate, len)
        whole, reading = SubTokenModel.around(model.backbone), replace(self.arguments, protocol="query_aware")
        self.uncompressed = Runner[tuple[int, ...]](whole, reading, partial(self._collate, whole=True), len)
        self._device = self.family.device
        self._say_once = cache(log.warning)
        if (warning := self.runner.counted.warning()) is not None:
            log.warning(warning)
        SubTokenLM.last = self

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None
    ) -> Self:
        """Build from ``model_args`` by name; they go before the harness's own ``--device`` and ``--batch_size``."""
        general = dict(additional_config or {})
        # the harness's default is the first GPU, whether there is one or not
        if "device" not in arg_dict and str(general.get("device")).startswith("cuda") and not torch.cuda.is_available():
            log.warning("there is no GPU: running on the CPU")
            general["device"] = "cpu"
        return cls(**{**general, **arg_dict})

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: Mapping[str, Any] | None = None) -> Self:
        """Build from one text likewise."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Take the harness's file of finished requests, which knows them by text alone, if equal settings filled it."""
        super().set_cache_hook(cache_hook)
        if (finished := cache_hook.dbdict) is None:
            return
        own = {name: value for name, value in self.arguments.settings.items() if name not in ("batch_size", "device")}
        if len(finished) and finished.get(SETTINGS) != own:
            others = finished.get(SETTINGS) or "another model"
            raise ValueError(f"the --use_cache file holds requests of {others}, and these are {own}; name another file")
        finished[SETTINGS] = own

    @property
    def max_length(self) -> int:
        """Positions that the model was made for; longer prompts are cut, as by the harness's own models."""
        return position_bound(self.family.decoder.config) or MAX_TOKENS

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """Return the token for an empty context: the one that begins a text, where there is one."""
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else int(first)

    @property
    def tokenizer_name(self) -> str:
        """Return the name under which the harness files prepared requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Write the turns as one text, in the tokenizer's own chat format."""
        how = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        return filled_template(self.tokenizer, chat_history, **how)

    def report(self) -> str:
        """Describe what compression kept, in lines."""
        alone = self.uncompressed.counted.prompts
        more = f"\n{alone:,} more prompts (rolling windows, single tokens) had nothing to compress" if alone else ""
        return f"{self.runner.counted}{more}"

    def get_model_info(self) -> dict[str, Any]:
        """Return the record beside the harness's results: the arguments, and what compression kept."""
        return {"subtoken": {"arguments": self.arguments.settings, **self.runner.counted.facts}}

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return token ids; with special tokens, unless told otherwise or the text begins with one."""
        begun = string.startswith(self.tokenizer.decode(self.prefix_token_id))
        special = not begun if add_special_tokens is None else add_special_tokens
        return list(self.tokenizer.encode(string, add_special_tokens=special))

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Score whole texts in nats, in windows of ``max_length`` tokens; nothing is compressed."""
        self._say_once(
            "rolling log-likelihoods read windows without a context that could be compressed: these are the scores of "
            "a full cache"
        )
        windows: list[tuple[tuple[int, ...], Sequence[int]]] = []
        owners, totals = [], [0.0] * len(requests)
        for owner, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for pair in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1):
                prompt, after = make_disjoint_window(pair)
                windows.append((tuple(prompt), after))
                owners.append(owner)
        with tqdm(total=len(windows), disable=disable_tqdm, desc="Running loglikelihood_rolling windows") as bar:
            scores = self.uncompressed.score(windows, lambda *_: bar.update())
        for owner, (value, _) in zip(owners, scores, strict=True):
            totals[owner] += value
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[Scored]:
        outcomes: list[Scored] = [(0.0, False)] * len(requests)
        # the last token is only predicted
        asked = [(self._fitting(context, len(after) - 1), after) for _, context, after in requests]
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Running loglikelihood requests") as bar:
            for runner, single in ((self.runner, False), (self.uncompressed, True)):
                members = [i for i, (prompt, _) in enumerate(asked) if (len(prompt) == 1) == single]

                def done(place: int, scored: Scored, members: list[int] = members) -> None:
                    i = members[place]
                    outcomes[i] = scored
                    bar.update()
                    self.cache_hook.add_partial("loglikelihood", requests[i][0], scored)

                runner.score([asked[i] for i in members], done)
        return outcomes

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Answer greedily, cut at the first of the texts that end answers; in the order of the requests."""
        asked = []
        for context, given in (request.args for request in requests):
            settings = greedy_settings(given, ANSWER_TOKENS)
            asked.append((self._fitting(self.tok_encode(context), settings.max_new_tokens), settings))
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Running generate_until requests") as bar:

            def done(i: int, text: str) -> None:
                bar.update()
                self.cache_hook.add_partial("generate_until", requests[i].args, text)

            return self.runner.generate(asked, done)

    def _fitting(self, ids: list[int], following: int) -> tuple[int, ...]:
        room = self.max_length - following
        words = f"{following} tokens after a prompt leave no room for it in the model's {self.max_length} positions"
        refuse((room < 1, f"{words}; ask for shorter answers (--gen_kwargs max_gen_toks=N)"))
        if len(ids) > room:
            self._say_once(f"prompts are cut to their last tokens to fit the model's {self.max_length} positions")
        return tuple(ids[-room:])

    def _collate(self, prompts: Sequence[tuple[int, ...]], whole: bool = False) -> Batch:
        asking, encoded = self.arguments.query_tokens, []
        for prompt in prompts:
            free = context_tokens(self.family, list(prompt)) if asking is None else max(0, len(prompt) - asking)
            # random choices must not depend on the batch
            name = hashlib.sha256(str(prompt).encode()).hexdigest()[:16]
            encoded.append(EncodedText(prompt, 0 if whole else free, record_id=f"text {name}"))
        return text_batch(self.family, encoded)
