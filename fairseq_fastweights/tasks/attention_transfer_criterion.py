"""`--criterion attention_transfer`: mixers learn to reproduce the output of the attention of `--transfer-from`.

This is the first step of conversions with few updates (Zhang et al. 2024, LoLCATs, Sec. 3.2; Goldstein et al. 2025,
RADLADS, step 1). No text is predicted, and only the mixers are trained.
"""

# No `from __future__ import annotations` here: fairseq reads the types of a configuration's fields as they stand.

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import FairseqDataclass
from fairseq.distributed import FullyShardedDataParallel
from fairseq.logging import metrics
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from fairseq_fastweights.conversion.transfer.base_model import BaseModel, find_files, read_base_model
from fairseq_fastweights.invalid_input import InvalidInput
from fairseq_fastweights.mixers.mixer import State
from fairseq_fastweights.mixers.softmax_attention import SoftmaxAttention


class AttentionTransfer:
    """Compares mixers with the attention of the teacher.

    One forward pass of the teacher, up to the last converted layer, serves all layers: each passes on the output of the
    attention, so that all layers have the inputs of the teacher's layers.

    Args:
        teacher: the model whose attention weights are kept here.
        decoder: a decoder with as many layers, whose weights outside its mixers are those of the teacher.

    Raises:
        ValueError: if all mixers are softmax attention.
    """

    def __init__(self, teacher: BaseModel, decoder: Any) -> None:
        self._pairs = [
            (mixer, build_attention(teacher, number))
            for number, mixer in enumerate(decoder.mixers)
            if not isinstance(mixer, SoftmaxAttention)
        ]
        if not self._pairs:
            raise InvalidInput("criterion is attention_transfer; the model must have a mixer other than softmax")

    def errors(self, model: Any, inputs: Mapping[str, Any]) -> Tensor:
        """The mean square of each mixer's error, divided by that of the attention's output.

        Args:
            model: the model of the decoder.
            inputs: the arguments of its `forward`.

        Returns:
            (mixers,), with gradients to the mixers' parameters alone, if gradients are enabled.
        """
        errors: list[Tensor] = []
        wanted = torch.is_grad_enabled()
        for mixer, attention in self._pairs:
            mixer.forward = partial(self._teach, mixer.forward, attention, errors, wanted)
        try:
            with torch.no_grad(), suppress(_AllCompared):
                model(**inputs, features_only=True)
        finally:
            for mixer, _ in self._pairs:
                del mixer.forward
        return torch.stack(errors)

    def _teach(
        self,
        forward: Callable[..., tuple[Tensor, State]],
        attention: SoftmaxAttention,
        errors: list[Tensor],
        gradients: bool,
        x: Tensor,
        state: State | None = None,
        padding: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, State]:
        """In place of a mixer's `forward`: returns the attention's output, and adds the mixer's error to `errors`."""
        target, _ = attention.to(x)(x, None, padding, **options)
        with torch.set_grad_enabled(gradients):
            given, state = forward(x, state, padding, **options)
            # |y - y'|^2 and |y'|^2 over real positions, in float32.
            difference, size = (given - target).float().square(), target.float().square()
            if padding is not None:
                difference, size = (y.masked_fill(padding.t()[..., None], 0) for y in (difference, size))
            errors.append(difference.sum() / size.sum())
        if len(errors) == len(self._pairs):  # the last mixer: the rest of the pass is not needed
            raise _AllCompared
        return target, state


class _AllCompared(Exception):
    """Ends a forward pass after the last mixer that is compared."""


def build_attention(teacher: BaseModel, layer: int) -> SoftmaxAttention:
    """The attention of a teacher's layer, counted from 0, without dropout."""
    start = f"decoder.layers.{layer}.self_attn."
    weights = {name.removeprefix(start): x for name, x in teacher.weights.items() if name.startswith(start)}
    options, heads = teacher.options, teacher.options["decoder_attention_heads"]
    # Sizes follow from the weights: q_proj is (heads * head_dim, width).
    inner, width = weights["q_proj.weight"].shape
    head_dim = inner // heads
    biases = "none" if "q_proj.bias" not in weights else "all" if "out_proj.bias" in weights else "qkv"
    attention = SoftmaxAttention(
        width,
        heads,
        rotary_dim=options.get("rotary_dim", 0),
        rotary_base=options.get("rotary_base", 10000.0),
        rotary_scaling=options.get("rotary_scaling", ""),
        kv_heads=len(weights["k_proj.weight"]) // head_dim,
        head_dim=head_dim,
        projection_bias=biases,
        query_key_norm_eps=options.get("query_key_norm_eps"),
        zero_centered_norms=options.get("zero_centered_norms", False),
        joint_norm=options.get("softmax_joint_norm", False),
        output_gate="output_gate_proj.weight" in weights,
    )
    attention.load_state_dict(weights)
    return attention.requires_grad_(False).eval()


@register_criterion("attention_transfer", dataclass=FairseqDataclass)
class AttentionTransferCriterion(FairseqCriterion):
    """The mean over the layers of |y - y'|^2 / |y'|^2, for outputs y of the mixers and y' of the teacher's attention.

    Raises:
        ValueError: unless the task has `transfer_from`, `transfer` is "all", and `carry_over_state` is not set.
    """

    def __init__(self, task: Any) -> None:
        super().__init__(task)
        options = task.args
        if getattr(options, "transfer_from", None) is None:
            raise InvalidInput("criterion is attention_transfer; it needs transfer_from, which is not set")
        if options.transfer != "all":
            raise InvalidInput(
                f"transfer is {options.transfer!r}; with criterion attention_transfer it must be all, as without "
                "--transfer: layers learn the attention of the source, which they need whole"
            )
        if options.carry_over_state:
            raise InvalidInput("carry_over_state is set; with criterion attention_transfer it must not be")
        self._source = options.transfer_from
        self._transfer: AttentionTransfer | None = None

    def forward(self, model: Any, sample: Any, reduce: bool = True) -> tuple[Tensor, int, dict[str, Any]]:
        """The loss, summed over the tokens as in fairseq, their number, and the values to log."""
        plain = _unwrapped(model)
        if self._transfer is None:
            self._transfer = AttentionTransfer(read_base_model(find_files(self._source)[0]), plain.decoder)
        tokens = sample["ntokens"]
        loss = self._transfer.errors(plain, sample["net_input"]).mean() * tokens
        logged = {"loss": loss.data, "ntokens": tokens, "sample_size": tokens, "nsentences": sample["target"].size(0)}
        return loss, tokens, logged

    @staticmethod
    def reduce_metrics(logging_outputs: list[dict[str, Any]]) -> None:
        """Logs the mean over all tokens."""
        loss, tokens = (sum(output[name] for output in logging_outputs) for name in ("loss", "ntokens"))
        metrics.log_scalar("loss", loss / tokens if tokens else math.nan, tokens, round=5)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        """True."""
        return True


def _unwrapped(model: Any) -> Any:
    """The model within fairseq's wrapper for several processes, which must not wait for a pass through all of it."""
    while True:
        if isinstance(model, (DistributedDataParallel, FullyShardedDataParallel)):
            raise InvalidInput("criterion is attention_transfer; with several processes ddp_backend must be legacy_ddp")
        if not hasattr(model, "module"):
            return model
        model = model.module
