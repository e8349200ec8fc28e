"""`--criterion attention_transfer`: mixers learn to give what the attention of `--transfer-from` gives."""

# No `from __future__ import annotations` here: fairseq reads the types of a configuration's fields as they stand.

import math
from typing import Any

from fairseq import utils
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import FairseqDataclass
from fairseq.distributed import FullyShardedDataParallel
from fairseq.logging import metrics
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from fairseq_fastweights.conversion.attention_transfer import AttentionTransfer
from fairseq_fastweights.conversion.source import find_files, read_source


@register_criterion("attention_transfer", dataclass=FairseqDataclass)
class AttentionTransferCriterion(FairseqCriterion):
    """Its loss is the mean over the layers of the relative error, 1 for a mixer that gives nothing.

    Raises:
        ValueError: if the task's options leave nothing to compare with.
    """

    def __init__(self, task: Any) -> None:
        super().__init__(task)
        options = task.args
        if getattr(options, "transfer_from", None) is None:
            raise ValueError("criterion is attention_transfer; it needs transfer_from, which is not set")
        if options.transfer != "all":
            raise ValueError(f"transfer is {options.transfer!r}; with criterion attention_transfer it must be all")
        if options.carry_over_state:
            raise ValueError("carry_over_state is set; with criterion attention_transfer it must not be")
        self._source = options.transfer_from
        self._transfer: AttentionTransfer | None = None

    def forward(self, model: Any, sample: Any, reduce: bool = True) -> tuple[Tensor, int, dict[str, Any]]:
        """The loss, summed over the tokens as fairseq has it, their number, and what is logged."""
        plain = _unwrapped(model)
        if self._transfer is None:
            self._transfer = AttentionTransfer(read_source(find_files(self._source)[0]), plain.decoder)
        tokens = sample["ntokens"]
        loss = self._transfer.errors(plain, sample["net_input"]).mean() * tokens
        logged = {"loss": loss.data, "ntokens": tokens, "sample_size": tokens, "nsentences": sample["target"].size(0)}
        return loss, tokens, logged

    @staticmethod
    def reduce_metrics(logging_outputs: list[dict[str, Any]]) -> None:
        """The mean over all tokens."""
        loss, tokens = (utils.item(sum(output[name] for output in logging_outputs)) for name in ("loss", "ntokens"))
        metrics.log_scalar("loss", loss / tokens if tokens else math.nan, tokens, round=5)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        """They can."""
        return True


def _unwrapped(model: Any) -> Any:
    """The model in what adds up the gradients of several processes.

    Raises:
        ValueError: if that would not see the gradients, as it waits for a pass through the whole model.
    """
    while True:
        if isinstance(model, (DistributedDataParallel, FullyShardedDataParallel)):
            raise ValueError("criterion is attention_transfer; with several processes ddp_backend must be legacy_ddp")
        if not hasattr(model, "module"):
            return model
        model = model.module
