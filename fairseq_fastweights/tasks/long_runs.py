"""Wraps functions of fairseq-train for long runs of every task, when --user-dir is imported.

Signals end a run with a checkpoint, a damaged last checkpoint is replaced, and one run at a time uses a --save-dir. The
log has the time that is left. On a CPU the memory of large tensors is kept for the next ones, and small models get few
threads.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any, NoReturn

import torch
from fairseq import checkpoint_utils
from fairseq.distributed import fully_sharded_data_parallel
from fairseq.distributed import utils as distributed_utils
from fairseq.file_io import PathManager
from fairseq.logging import progress_bar

from fairseq_fastweights.freed_memory import keep_freed_memory
from fairseq_fastweights.tasks.changed_data import CHANGED, FileError, LastUpdate
from fairseq_fastweights.tasks.interruptions import Interruption
from fairseq_fastweights.tasks.pace import Pace, warn_of_busy_cores
from fairseq_fastweights.tasks.save_dir import claim, replace_damaged

logger = logging.getLogger(__name__)

_interruption = Interruption()
_pace = Pace()
_last_update: LastUpdate
"""Of the epoch that is trained."""
_saved = 0
"""How many checkpoints this process has written, or helped to."""
_looked_after: dict[str, Any] = {}
"""By module, the function that was put there: a module that is loaded anew has lost it."""


def _largest(trainer: Any, number: int) -> int:
    """The largest of all processes' numbers; waits for all processes."""
    if trainer.data_parallel_world_size == 1:
        return number
    numbers = torch.tensor(number, device=trainer.device)
    distributed_utils.all_reduce(numbers, trainer.data_parallel_process_group, op="max")
    return int(numbers)


def _verify_checkpoint_directory(original: Callable[..., Any]) -> Callable[..., Any]:
    def verify(save_dir: str) -> None:
        claim(save_dir)

    return verify


def _load_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    def load(cfg: Any, trainer: Any, **others: Any) -> Any:
        """fairseq's; where the last checkpoint is damaged, of the newest that is whole."""
        _look_after_signals()
        if trainer.device.type == "cpu":
            keep_freed_memory()
            warn_of_busy_cores()
        if cfg.restore_file == "checkpoint_last.pt" and not cfg.no_save:
            if trainer.is_data_parallel_master:
                replace_damaged(cfg.save_dir, trainer.checkpoint_suffix)
            _largest(trainer, 0)  # the others look when the first is done
        return original(cfg, trainer, **others)

    return load


def _save_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    def save(cfg: Any, trainer: Any, epoch_itr: Any, val_loss: float | None) -> Any:
        global _saved
        if not cfg.no_save and hasattr(epoch_itr, "gather_states"):
            epoch_itr.gather_states()
        original(cfg, trainer, epoch_itr, val_loss)
        _saved += 1

    return save


def _train(original: Callable[..., Any]) -> Callable[..., Any]:
    def train(cfg: Any, trainer: Any, task: Any, epoch_itr: Any) -> Any:
        """fairseq's, of one epoch. Signals are noted until the last one's end."""
        global _last_update
        _last_update = LastUpdate(epoch_itr)
        _interruption.begin()
        goes_on = False
        try:
            losses, should_stop = original(cfg, trainer, task, epoch_itr)
            updates, epochs = (getattr(cfg.optimization, name) or math.inf for name in ("max_update", "max_epoch"))
            goes_on = not should_stop and trainer.get_num_updates() < updates and epoch_itr.next_epoch_idx <= epochs
            return losses, should_stop
        except FileError:
            if trainer.data_parallel_world_size == 1 or _last_update.all_end:
                _last_update.keep(cfg, trainer, epoch_itr)
                _largest(trainer, 0)  # all wait for the one that writes
            raise
        finally:
            if not goes_on:
                _interruption.end()

    return train


def _validate_and_save(original: Callable[..., Any]) -> Callable[..., Any]:
    def validate_and_save(cfg: Any, trainer: Any, task: Any, epoch_itr: Any, *others: Any) -> Any:
        """fairseq's, after every update; the last one if a process has been interrupted."""
        _interruption.log.open_if_unread()
        _pace.note(cfg, trainer, epoch_itr)
        before, changed = _saved, _last_update.note(epoch_itr)
        results = original(cfg, trainer, task, epoch_itr, *others)
        number = _largest(trainer, changed or _interruption.number)
        if number == CHANGED:
            _last_update.end()
        if number:
            _interruption.log.open()  # that of the other processes
            if _saved == before:
                checkpoint_utils.save_checkpoint(cfg.checkpoint, trainer, epoch_itr, None)
            if cfg.checkpoint.write_checkpoints_asynchronously:
                PathManager.async_close()  # waits for them, as fairseq does at a training's end
            # torchrun ends the others as soon as one has ended: all wait for the one that writes.
            _largest(trainer, number)
            unsaved = [name for name in ("no_save", "no_last_checkpoints") if getattr(cfg.checkpoint, name)]
            outcome = f"{unsaved[0]} is set" if unsaved else "the same command continues from there"
            logger.info("interrupted after %s updates; %s", trainer.get_num_updates(), outcome)
            _interruption.leave(number)
        return results

    return validate_and_save


def _progress_bar(original: Callable[..., Any]) -> Callable[..., Any]:
    def bar(*arguments: Any, **options: Any) -> Any:
        """fairseq's; what it writes elsewhere, as to tensorboard, does not keep an interrupted run from ending."""
        made = original(*arguments, **options)
        made.log, made.print = _unless_interrupted(made.log), _unless_interrupted(made.print)
        return made

    return bar


def _unless_interrupted(tell: Callable[..., None]) -> Callable[..., None]:
    def tell_or_not(*arguments: Any, **options: Any) -> None:
        try:
            tell(*arguments, **options)
        except Exception as error:
            if not _interruption.number:
                raise
            logger.warning("not logged: %s", error)

    return tell_or_not


def _put_around(module: ModuleType, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    name = wrapper.__name__[1:]
    original = getattr(module, name)
    setattr(module, name, wraps(original)(wrapper(original)))


def _look_after_signals() -> None:
    """Looks after signals in the module that is about to train, which was not there before, or was started itself."""
    for name in ("fairseq_cli.train", "__main__"):
        module = sys.modules.get(name)
        found = getattr(module, "validate_and_save", None)
        if module is not None and found is not None and found is not _looked_after.get(name):
            for wrapper in (_train, _validate_and_save):
                _put_around(module, wrapper)
            _looked_after[name] = module.__dict__["validate_and_save"]


def _refuse_to_shard(cfg: Any) -> NoReturn:
    raise SystemExit(
        "ddp_backend is fully_sharded, for which this fairseq needs fairscale, whose last release is of 2022; it must "
        "be another, or fairseq the one that tools/build_fairseq.py builds"
    )


def _look_after_sharding() -> None:
    """Refuses to shard in a fairseq without the patch that does it, before the model is built."""
    for name in ("fairseq_cli.train", "__main__"):
        module = sys.modules.get(name)
        if hasattr(module, "fsdp_enable_wrap") and not hasattr(fully_sharded_data_parallel, "check_options"):
            vars(module)["fsdp_enable_wrap"] = _refuse_to_shard


_look_after_sharding()
for _wrapper in (_verify_checkpoint_directory, _load_checkpoint, _save_checkpoint):
    _put_around(checkpoint_utils, _wrapper)
_put_around(progress_bar, _progress_bar)
