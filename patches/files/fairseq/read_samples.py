"""Notes which samples of an epoch were read: a run that goes on with other batches leaves out these alone."""

import logging
from typing import Any

import numpy as np
import torch
from fairseq.digests import crc32
from fairseq.invalid_input import InvalidInput

logger = logging.getLogger(__name__)


class ReadSamples:
    """Notes which samples an `EpochBatchIterator` has read of its epoch.

    Attributes:
        rest: the batches of the samples that were left when the epoch was divided anew; None if it was not.
        start: how many batches each process had read by then.
    """

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator
        self.begin()

    def begin(self) -> None:
        """Begins an epoch, whose samples may have other sizes."""
        self._identity: list[int] | None = None
        self._order: list[Any] | None = None
        self._before: torch.Tensor | None = None
        self.rest: Any = None
        self.start = 0

    def note_order(self, batches: list[Any]) -> None:
        """Notes the batches of the epoch, those of all processes in turn."""
        self._order = batches
        self._digest: int | None = None

    def state(self, done: int) -> dict[str, Any]:
        """The state for a checkpoint, after `done` batches of each process; {} if no order was noted."""
        if self._order is None:
            return {}
        read = _unpacked(self._before, len(self._iterator.dataset))
        read[_samples(self._order[: done * self._iterator.num_shards])] = True
        packed = torch.from_numpy(np.packbits(read))
        kept = {"identity": self.identity(), "batches": self.digest(), "read": packed}
        return {**kept, "before": self._before, "start": self.start}

    def take_up(self, state: dict[str, Any] | None, done: int) -> None:
        """Goes on after a `state`: with the batches that followed, or where they are others, with the samples left.

        Raises:
            InvalidInput: where the samples are others, or the task cannot divide them anew.
        """
        iterator = self._iterator
        if state is None or state["identity"] != self.identity():
            self._complain("samples")
            return
        # First the batches of the checkpoint's own division, then those of a new one from its place.
        for read, start in ((state["before"], state["start"]), (state["read"], done)):
            if read is not None:
                left = self._left(read)
                if left is None:
                    self._complain("batches")
                    return
                self.rest = iterator.divide(left)
            self._before, self.start = read, start
            iterator.arrange(iterator.epoch, iterator.fix_batches_to_gpus, iterator.shuffle)
            # Equal batches: nothing was changed, and `done` of them are skipped as usual.
            if self.digest() == state["batches"]:
                return
        logger.info("what is left of the epoch is divided into batches anew")

    def _left(self, read: torch.Tensor) -> Any:
        """The samples that are not among those; None where samples repeat, or the task makes batches by itself."""
        if self._iterator.divide is None:
            return None
        samples = _samples(self._iterator.frozen_batches)
        # A flag for each sample cannot tell how often it was read.
        repeat = len(np.unique(samples)) < len(samples)
        return None if repeat else samples[~_unpacked(read, len(self._iterator.dataset))[samples]]

    def _complain(self, of: str) -> None:
        iterator = self._iterator
        complaint = (
            f"{iterator.changed or ', '.join(iterator.files) or 'data'}: the checkpoint stopped within an epoch of "
            f"other {of}"
        )
        if iterator.goes_on:
            raise InvalidInput(
                f"{complaint}; they must be the same, or --reset-dataloader be given, which begins an epoch"
            )
        logger.warning("%s: as many batches as were read are left out, unless --reset-dataloader is given", complaint)

    def identity(self) -> list[int]:
        """The number of the data set's samples and a digest of their sizes: other samples differ in one of them."""
        if self._identity is None:
            dataset = self._iterator.dataset
            try:
                sizes = np.asarray(dataset.sizes, np.int64)
            except (AttributeError, NotImplementedError, TypeError, ValueError):
                sizes = np.empty(0, np.int64)
            self._identity = [len(dataset), crc32(sizes.tobytes())]
        return self._identity

    def digest(self) -> int:
        """A digest of the epoch's batches, and of how many processes read them."""
        if self._digest is None:
            assert self._order is not None
            # The lengths tell [[1], [2]] from [[1, 2]].
            lengths = [self._iterator.num_shards, *map(len, self._order)]
            self._digest = crc32(np.concatenate([lengths, _samples(self._order)]).tobytes())
        return self._digest


def _samples(batches: Any) -> Any:
    found = [batch for batch in batches if len(batch)]
    return np.concatenate(found).astype(np.int64) if found else np.empty(0, np.int64)


def _unpacked(flags: torch.Tensor | None, count: int) -> Any:
    return np.zeros(count, bool) if flags is None else np.unpackbits(flags.numpy(), count=count).astype(bool)
