"""Data that changes under a training: the last update is kept, and all processes end.

fairseq's readers raise a `FileError` for such data. The fairseq that `tools/build_fairseq.py` builds notices it.
"""

from __future__ import annotations

import logging
from typing import Any, NoReturn

from fairseq import checkpoint_utils

try:
    from fairseq.data_files import first_change
    from fairseq.text_files import FileError as FileError
except ImportError:
    from fairseq_fastweights.files.text_files import FileError as FileError

    def first_change() -> str | None:
        """None: that fairseq does not look."""
        return None


logger = logging.getLogger(__name__)

CHANGED = 1000
"""Stands among the numbers of signals for data that has changed."""


class LastUpdate:
    """The place in the data after the last update of an epoch, for a checkpoint.

    Attributes:
        all_end: True once all processes know that the data has changed. Before, the others wait for this one's part
            of the next update, so that no checkpoint can be written together.
    """

    def __init__(self, epoch_itr: Any) -> None:
        self.all_end = False
        self._former, following = (getattr(epoch_itr, f"_{which}_epoch_itr", None) for which in ("cur", "next"))
        self._batches = 0 if following is None else following.n
        self._complaint: str | None = None
        while first_change():  # of data that something else in this process has open; reading it is still an error
            pass

    def note(self, epoch_itr: Any) -> int:
        """After an update: `CHANGED` if the data has changed, otherwise 0."""
        self._batches = epoch_itr.iterations_in_epoch
        self._complaint = first_change()
        return 0 if self._complaint is None else CHANGED

    def end(self) -> NoReturn:
        """Ends the training, as all processes do."""
        self.all_end = True
        raise FileError(self._complaint or "data has changed; another process says which file")

    def keep(self, cfg: Any, trainer: Any, epoch_itr: Any) -> None:
        """Saves the last update."""
        current = getattr(epoch_itr, "_cur_epoch_itr", None)
        if current is None or current is self._former:  # not begun: the checkpoint of the epoch before holds
            return
        current.n = self._batches  # some batches of the next update may have been read
        try:
            checkpoint_utils.save_checkpoint(cfg.checkpoint, trainer, epoch_itr, None)
        except Exception as error:
            logger.warning("the last update is not saved: %s", error)
