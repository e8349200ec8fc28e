"""Checkpoints of fairseq as a model of lm-evaluation-harness, `--model fairseq-fastweights`."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from tqdm import tqdm

from fairseq_fastweights.invalid_input import InvalidInput, check_number

log = logging.getLogger(f"lm_eval.{__name__}")  # lm_eval shows the messages of loggers below its own

_NOT_OF_CHECKPOINTS = {"parallelize", "tp_plan", "peft", "delta", "autogptq", "gptqmodel", "gguf_file"}

UNLIMITED = 2**60
"""A number of tokens that no text exceeds, and that torch's slices allow."""

Request = tuple[tuple[str, str] | None, list[int], list[int]]
"""A request: the key of its score, and the tokens of a context and of its continuation."""


@dataclass
class Row:
    """Tokens to read, and all continuations that consist of the last of them and one more token.

    So the choices of a question that have one token each are scored in one row.

    Attributes:
        tokens: the tokens to read.
        endings: for each continuation, the number of its request, its length and its last token.
        log_probs: log-probabilities of tokens, from the first of the longest continuation to the last of the row.
        greedy: whether each of these is the most probable token.
        last: log-probabilities of the token after the row.
    """

    tokens: list[int]
    endings: list[tuple[int, int, int]] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    greedy: list[bool] = field(default_factory=list)
    last: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def first(self) -> int:
        """The first position whose prediction is scored."""
        return len(self.tokens) - max(length for _, length, _ in self.endings)

    def read(self, logits: Tensor, begin: int, dtype: torch.dtype) -> None:
        """Stores the scores in a segment's predictions, (steps, words), for the positions from `begin` on."""
        start = max(self.first, begin)
        scored = logits[start - begin : max(len(self.tokens) - begin, 0)].log_softmax(-1, dtype=dtype)
        # The token after position t is scored by the prediction at t; that after the last one by `last`.
        following = torch.tensor(
            self.tokens[start + 1 : start + 1 + len(scored)], device=logits.device, dtype=torch.long
        )
        within = scored[: len(following)]
        self.log_probs += within.gather(-1, following[:, None])[:, 0].tolist()
        self.greedy += (within.argmax(-1) == following).tolist()
        if len(within) < len(scored):
            self.last = scored[-1]

    def scores(self) -> Iterator[tuple[int, tuple[float, bool]]]:
        """Yields the request's number, the log-probability and whether each token is the likeliest, of each ending."""
        likeliest = int(self.last.argmax())
        for number, length, token in self.endings:
            start = len(self.log_probs) + 1 - length
            greedy = all(self.greedy[start:]) and token == likeliest
            yield number, (sum(self.log_probs[start:]) + float(self.last[token]), greedy)


@register_model("fairseq-fastweights")
class FastWeightLM(HFLM):
    """A checkpoint that fairseq wrote, as a model of lm-evaluation-harness.

    If the model's state has a fixed size, texts of any length are read whole, in segments that pass on the state. If
    the model has positions, or its state grows, as with softmax attention, only the end of a text that is too long is
    read, as in lm_eval's own models.

    Args:
        checkpoint: a checkpoint, or its folder. It, `data` and `tokenizer` are arguments of
            `conversion.trained_models.load_for_causal_lm`.
        max_tokens: with `--batch_size auto`, the largest number of tokens of a batch, padding included. Batches have
            rows of similar lengths, the longest first, and at most `--max_batch_size` rows.
        segment: number of tokens of a row that are read at a time.
        dtype: of the weights; "auto" for that of the checkpoint.
        options: the other arguments of lm_eval's `hf`, except those for loading a model. With `add_bos_token=False` no
            token is put before a text; otherwise that of the tokenizer of `to-huggingface`: the end of another text, as
            in fairseq, or, for a model that `from-huggingface` made and that still has its original mixers, that of its
            original tokenizer. Scores are those of `hf` for that folder.

    Raises:
        ValueError: if an argument is not allowed, or the checkpoint cannot be used; the message says why.
    """

    def __init__(
        self,
        checkpoint: str,
        data: str | None = None,
        tokenizer: str | None = None,
        max_tokens: int = 8192,
        segment: int = 1024,
        dtype: str | torch.dtype = "auto",
        **options: Any,
    ) -> None:
        for name, value in (("max_tokens", max_tokens), ("segment", segment)):
            check_number(name, value, 1, whole=True)
        # lm_eval makes numbers of the names of folders that are some.
        data, tokenizer = (None if name is None else str(name) for name in (data, tokenizer))
        self._model, self.tokenizer, self.updates = load(Path(str(checkpoint)), data, tokenizer)
        self.max_tokens, self.segment = max_tokens, segment
        self.tokens_read, self.seconds = 0, 0.0
        # A whole path cannot be taken for a name of the hub, which lm_eval would ask for it.
        super().__init__(str(Path(str(checkpoint)).resolve()), backend="causal", dtype=dtype, **options)

    def _get_config(self, *arguments: Any, **options: Any) -> None:
        self._config = self._model.config

    def _create_tokenizer(self, *arguments: Any, add_bos_token: bool | None = None, **options: Any) -> None:
        """Sets whether a token is put before texts, if the option is given; the tokenizer came with the model."""
        if add_bos_token is not None:
            self.tokenizer.add_bos_token = add_bos_token

    def _create_model(self, pretrained: str, *, dtype: str | torch.dtype, **options: Any) -> None:
        known = signature(HFLM._create_model).parameters
        for name, value in options.items():
            if name not in known or (name in _NOT_OF_CHECKPOINTS and value):
                raise InvalidInput(f"{name} is {value}; it cannot be set for a checkpoint of fairseq")
        wanted = None if dtype == "auto" else getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        if dtype != "auto" and not (isinstance(wanted, torch.dtype) and wanted.is_floating_point):
            raise InvalidInput(f"dtype is {dtype}; it must be auto, float32, bfloat16, float16 or float64")
        self._model.to(self.device, wanted)

    @property
    def max_length(self) -> int:
        """The largest number of tokens of a text."""
        if self._max_length:
            return int(self._max_length)
        unlimited = self.config.position_embeddings == "none" and all(
            mixer.carries and not mixer.bounded for mixer in self.model.model.mixers
        )
        return UNLIMITED if unlimited else int(self.config.max_position_embeddings)

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        scores: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        bar = tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0, desc="Scoring continuations")
        for batch in self._batches(self._rows(requests)):
            started = time.monotonic()
            self._read(batch)
            for number, score in (found for row in batch for found in row.scores()):
                scores[number] = score
                if (key := requests[number][0]) is not None:
                    self.cache_hook.add_partial("loglikelihood", key, score)
                bar.update()
            self._count(sum(len(row.tokens) for row in batch), started)
        bar.close()
        return scores

    def _rows(self, requests: Sequence[Request]) -> list[Row]:
        """The rows to read, the longest last."""
        rows: dict[tuple[int, ...], Row] = {}
        for number, (_, context, continuation) in enumerate(requests):
            if not 0 < len(continuation) <= self.max_length:
                most = "" if self.max_length == UNLIMITED else f" and at most {self.max_length}"
                raise InvalidInput(f"a continuation has {len(continuation)} tokens; it must have at least 1{most}")
            # A context of spaces may have no tokens.
            *tokens, last = [*(context or [self.prefix_token_id]), *continuation][-self.max_length - 1 :]
            rows.setdefault(tuple(tokens), Row(tokens)).endings.append((number, len(continuation), last))
        return sorted(rows.values(), key=lambda row: len(row.tokens))

    def _batches(self, rows: list[Row]) -> Iterator[list[Row]]:
        """Takes rows from the end of the list, so that those that were read are freed."""
        while rows:
            size = self._detect_batch_size(len(rows[-1].tokens)) if self.batch_size == "auto" else self.batch_size
            yield [rows.pop() for _ in range(min(size, len(rows)))]

    def _detect_batch_size(self, length: int | None = None) -> int:
        """The number of rows of this length in a batch; None for the length before generation."""
        return max(1, min(self.max_batch_size, self.max_tokens // (length or self.segment)))

    @torch.no_grad()
    def _read(self, batch: Sequence[Row]) -> None:
        """Reads rows, the longest first, in segments, each from the state after the one before."""
        longest = len(batch[0].tokens)
        # The padding after a row's end is not scored, and earlier positions do not see it.
        tokens = torch.tensor([row.tokens + [0] * (longest - len(row.tokens)) for row in batch], device=self.device)
        first = min(row.first for row in batch)  # no logits are needed before
        cache = None
        for start in range(0, longest, self.segment):
            end = min(start + self.segment, longest)
            begin = min(max(first, start), end - 1)  # where the output layer is needed
            with torch.autocast(self.device.type, self.mixed_precision_dtype, self.mixed_precision_dtype is not None):
                output = self.model(
                    tokens[:, start:end],
                    past_key_values=cache,
                    use_cache=longest > self.segment,
                    logits_to_keep=end - begin,
                )
            cache = output.get("past_key_values")
            for row, logits in zip(batch, output.logits, strict=True):
                row.read(logits, begin, self.softmax_dtype or torch.float32)

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        texts = [request.args[0] for request in requests]
        windows = [
            [
                (None, *utils.make_disjoint_window(window))
                for window in utils.get_rolling_token_windows(
                    self.tok_encode(text),
                    self.prefix_token_id,
                    self.max_length,
                    context_len=1,
                )
            ]
            for text in texts
        ]
        scores = iter(self._loglikelihood_tokens([window for text in windows for window in text], disable_tqdm))
        sums = [sum((next(scores)[0] for _ in text), 0.0) for text in windows]
        for text, score in zip(texts, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), score)
        return sums

    def _model_generate(self, context: Tensor, *arguments: Any, attention_mask: Tensor, **options: Any) -> Tensor:
        started = time.monotonic()
        output: Tensor = super()._model_generate(context, *arguments, attention_mask=attention_mask, **options)
        self._count(int(attention_mask.sum()) + output[:, context.shape[1] :].numel(), started)
        return output

    def _count(self, tokens: int, started: float) -> None:
        """Counts tokens that were read or written since `started`, for the speed."""
        self.tokens_read += tokens
        self.seconds += time.monotonic() - started

    def get_model_info(self) -> dict[str, Any]:
        """The entries about the model in lm_eval's results, with its speed."""
        speed = self.tokens_read / self.seconds if self.seconds else None
        if speed is not None:
            log.info(f"{self.tokens_read:,} tokens, {speed:,.0f} tokens per second")
        return {
            **super().get_model_info(),
            "updates": self.updates,
            "tokens": self.tokens_read,
            "tokens_per_second": speed,
        }


def load(checkpoint: Path, data: str | None, tokenizer: str | None) -> tuple[Any, Any, int | None]:
    """Loads a checkpoint's model and tokenizer, and the number of updates after which it was written, if known."""
    from fairseq_fastweights.conversion.trained_models import find_run, load_run

    run = find_run(checkpoint, data, tokenizer)
    model, tokens, _ = load_run(run)
    return model, tokens, run.updates
