"""Extends fairseq-train for long runs of every task, when --user-dir is imported.

Signals end a run with a checkpoint, a damaged last checkpoint is replaced, and one run at a time uses a --save-dir. The
log has the time that is left. On a CPU the memory of large tensors is kept for the next ones, and small models get few
threads.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from fairseq import checkpoint_utils
from fairseq.distributed import utils as distributed_utils
from fairseq.file_io import PathManager

from fairseq_fastweights.freed_memory import keep_freed_memory
from fairseq_fastweights.tasks.interruptions import Interruption
from fairseq_fastweights.tasks.pace import Pace, warn_of_busy_cores
from fairseq_fastweights.tasks.save_dir import claim, replace_damaged

try:
    # Readers raise a `FileError` for data that has changed.
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


class LongRun:
    """The state of the run of this process. fairseq calls each public method in place of its function of that name.

    The first argument of a method is fairseq's function, the others are those of the function.
    """

    def __init__(self) -> None:
        self._interruption = Interruption()
        self._pace = Pace()
        self._last_update: LastUpdate  # of the epoch that is trained
        self._saved = 0  # checkpoints that this process has written, or helped to write

    def verify_checkpoint_directory(self, original: Callable[..., Any], save_dir: str) -> None:
        """Makes the folder, and locks it until this process ends."""
        claim(save_dir)

    def load_checkpoint(self, original: Callable[..., Any], cfg: Any, trainer: Any, **others: Any) -> Any:
        """Loads the last checkpoint; the newest undamaged one where that is damaged."""
        if trainer.device.type == "cpu":
            keep_freed_memory()
            warn_of_busy_cores()
        if cfg.restore_file == "checkpoint_last.pt" and not cfg.no_save:
            if trainer.is_data_parallel_master:
                replace_damaged(cfg.save_dir, trainer.checkpoint_suffix)
            _largest(trainer, 0)  # the others look when the first is done
        return original(cfg, trainer, **others)

    def save_checkpoint(self, original: Callable[..., Any], cfg: Any, trainer: Any, epoch_itr: Any, loss: Any) -> None:
        """Saves a checkpoint, in which an iterator that carries states has those of all processes."""
        if not cfg.no_save and hasattr(epoch_itr, "gather_states"):
            epoch_itr.gather_states()
        original(cfg, trainer, epoch_itr, loss)
        self._saved += 1

    def train(self, original: Callable[..., Any], cfg: Any, trainer: Any, task: Any, epoch_itr: Any) -> Any:
        """Trains for one epoch. Signals are noted until the end of the last epoch."""
        self._last_update = LastUpdate(epoch_itr)
        self._interruption.begin()
        goes_on = False
        try:
            losses, should_stop = original(cfg, trainer, task, epoch_itr)
            updates, epochs = (getattr(cfg.optimization, name) or math.inf for name in ("max_update", "max_epoch"))
            goes_on = not should_stop and trainer.get_num_updates() < updates and epoch_itr.next_epoch_idx <= epochs
            return losses, should_stop
        except FileError:
            if trainer.data_parallel_world_size == 1 or self._last_update.all_end:
                self._last_update.keep(cfg, trainer, epoch_itr)
                _largest(trainer, 0)  # all wait for the one that writes
            raise
        finally:
            if not goes_on:
                self._interruption.end()

    def validate_and_save(
        self, original: Callable[..., Any], cfg: Any, trainer: Any, task: Any, epoch_itr: Any, *others: Any
    ) -> Any:
        """Validates and saves if it is time to, after every update; ends the run if a process was interrupted."""
        self._interruption.log.open_if_unread()
        self._pace.note(cfg, trainer, epoch_itr)
        before, changed = self._saved, self._last_update.note(epoch_itr)
        results = original(cfg, trainer, task, epoch_itr, *others)
        number = _largest(trainer, changed or self._interruption.number)
        if number == CHANGED:
            self._last_update.end()
        if number:
            self._interruption.log.open()  # that of the other processes
            if self._saved == before:
                checkpoint_utils.save_checkpoint(cfg.checkpoint, trainer, epoch_itr, None)
            if cfg.checkpoint.write_checkpoints_asynchronously:
                PathManager.async_close()  # waits for them, as fairseq does at a training's end
            # torchrun ends the others as soon as one has ended: all wait for the one that writes.
            _largest(trainer, number)
            unsaved = [name for name in ("no_save", "no_last_checkpoints") if getattr(cfg.checkpoint, name)]
            outcome = f"{unsaved[0]} is set" if unsaved else "the same command continues from there"
            logger.info("interrupted after %s updates; %s", trainer.get_num_updates(), outcome)
            self._interruption.leave(number)
        return results

    def progress_bar(self, original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Makes a progress bar, whose errors, as those of tensorboard, do not keep an interrupted run from ending."""
        bar = original(*arguments, **options)
        bar.log, bar.print = self._unless_interrupted(bar.log), self._unless_interrupted(bar.print)
        return bar

    def _unless_interrupted(self, tell: Callable[..., None]) -> Callable[..., None]:
        def tell_or_not(*arguments: Any, **options: Any) -> None:
            try:
                tell(*arguments, **options)
            except Exception as error:
                if not self._interruption.number:
                    raise
                logger.warning("not logged: %s", error)

        return tell_or_not


def _largest(trainer: Any, number: int) -> int:
    """The largest of all processes' numbers; waits for all processes."""
    if trainer.data_parallel_world_size == 1:
        return number
    # A signal's number in any process is that of all; `CHANGED` is larger than each.
    numbers = torch.tensor(number, device=trainer.device)
    distributed_utils.all_reduce(numbers, trainer.data_parallel_process_group, op="max")
    return int(numbers)


try:
    from fairseq.extensions import extend
except ImportError:
    logger.warning(
        "this fairseq is not patched: an interrupted training saves no checkpoint, a damaged one is not replaced, and "
        "two trainings may use one --save-dir; tools/build_fairseq.py builds a fairseq that is patched"
    )
else:
    extend(LongRun())
