"""`--criterion attention_transfer`: mixers learn to reproduce the attention of the model of `--transfer-from`."""

# No `from __future__ import annotations` here: fairseq reads the types of a configuration's fields as they stand.

import math
from typing import Any

from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import FairseqDataclass
from fairseq.distributed import FullyShardedDataParallel
from fairseq.logging import metrics
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from fairseq_fastweights.conversion.transfer.attention_transfer import AttentionTransfer
from fairseq_fastweights.conversion.transfer.base_model import find_files, read_base_model
from fairseq_fastweights.invalid_input import InvalidInput


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
    """The model within fairseq's wrapper for several processes.

    Raises:
        ValueError: if that wrapper adds up gradients only after a forward pass through the whole model.
    """
    while True:
        if isinstance(model, (DistributedDataParallel, FullyShardedDataParallel)):
            raise InvalidInput("criterion is attention_transfer; with several processes ddp_backend must be legacy_ddp")
        if not hasattr(model, "module"):
            return model
        model = model.module
