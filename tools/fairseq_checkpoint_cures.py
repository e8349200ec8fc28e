"""What loses checkpoints of fairseq, and what decides which are kept and when a run stops but is in none of them.

Each row of a cure: a file, what stands there, and what takes its place (`fairseq_cures.Edit`).
"""

_CHECKPOINTS = "fairseq/checkpoint_utils.py"
_PLATEAU = "fairseq/optim/lr_scheduler/reduce_lr_on_plateau.py"
_TRAIN = "fairseq_cli/train.py"

CHECKPOINT_CURES: dict[str, list[tuple[str, str, str]]] = {
    # A write that failed was repeated into the same open file, after what was there of the first. A checkpoint was
    # written beside the last one and renamed, but its copies, checkpoint_last.pt mostly, were written over the last
    # ones, and so was what iopath wrote in the background, where nobody heard of an error; it made no copies at all.
    # All of it goes through `fairseq_checkpoint_writer.py`.
    "whole_checkpoints": [
        (
            _CHECKPOINTS,
            """    if async_write:
        with PathManager.opena(filename, "wb") as f:
            _torch_persistent_save(obj, f)
    else:
        if PathManager.supports_rename(filename):
            # do atomic save
            with PathManager.open(filename + ".tmp", "wb") as f:
                _torch_persistent_save(obj, f)
            PathManager.rename(filename + ".tmp", filename)
        else:
            # fallback to non-atomic save
            with PathManager.open(filename, "wb") as f:
                _torch_persistent_save(obj, f)


def _torch_persistent_save(obj, f):
    if isinstance(f, str):
        with PathManager.open(f, "wb") as h:
            torch_persistent_save(obj, h)
        return
    for i in range(3):
        try:
            return torch.save(obj, f)
        except Exception:
            if i == 2:
                logger.error(traceback.format_exc())
                raise
""",
            """    try:
        if PathManager.supports_rename(filename):
            checkpoint_writer.save(obj, filename, async_write)
        else:
            open_file = PathManager.opena if async_write else PathManager.open
            with open_file(filename, "wb") as f:
                torch.save(checkpoint_writer.with_digests(obj), f)
    except Exception:
        logger.error(traceback.format_exc())
        raise
""",
        ),
        (
            _CHECKPOINTS,
            """            if cfg.write_checkpoints_asynchronously:
                # TODO[ioPath]: Need to implement a delayed asynchronous
                # file copying/moving feature.
                logger.warning(
""",
            """            if PathManager.supports_rename(cp):
                checkpoint_writer.copy(
                    checkpoints[0], cp, cfg.write_checkpoints_asynchronously
                )
            elif cfg.write_checkpoints_asynchronously:
                # TODO[ioPath]: Need to implement a delayed asynchronous
                # file copying/moving feature.
                logger.warning(
""",
        ),
        (
            _CHECKPOINTS,
            "import numpy as np\nimport torch\n",
            "import numpy as np\nimport torch\nfrom fairseq import checkpoint_writer\n",
        ),
        (
            "fairseq/file_io.py",
            """        global IOPathManager
        if IOPathManager:
            return IOPathManager.async_close()
""",
            """        global IOPathManager
        from fairseq import checkpoint_writer

        checkpoint_writer.finish()
        if IOPathManager:
            return IOPathManager.async_close()
""",
        ),
    ],
    # A validation loss of NaN was the best one, or made the next one so. The best loss of an earlier training of the
    # same process, of another metric or, with --restore-file, of another folder kept later ones from being the best.
    # How often validation had brought nothing better, for --patience, was in no checkpoint.
    "validations_in_checkpoints": [
        (
            _CHECKPOINTS,
            "logger = logging.getLogger(__name__)\n\n\ndef save_checkpoint(",
            '''logger = logging.getLogger(__name__)

# For --patience: the best validation loss so far, and the number of validations since.
early_stopping = {"best": None, "num_runs": 0}


def _metric(cfg: CheckpointConfig):
    """What validation losses are; those of another metric cannot be compared."""
    return [cfg.best_checkpoint_metric, cfg.maximize_best_checkpoint_metric]


def _restore_validations(cfg: CheckpointConfig, extra_state):
    """The best loss and the count for --patience, as the checkpoint of a run has them; anew without one."""
    vars(save_checkpoint).pop("best", None)
    early_stopping.update(best=None, num_runs=0)
    if extra_state is None or extra_state.get("metric", _metric(cfg)) != _metric(cfg):
        return
    best = extra_state.get("best")
    if best is not None and not math.isnan(best):
        save_checkpoint.best = best
        early_stopping["best"] = best  # of a checkpoint that does not have it
    early_stopping.update(extra_state.get("early_stopping", {}))


def save_checkpoint(''',
        ),
        (_CHECKPOINTS, "import logging\nimport os\n", "import logging\nimport math\nimport os\n"),
        (
            _CHECKPOINTS,
            "    if val_loss is not None:\n        best_function",
            "    if val_loss is not None and not math.isnan(val_loss):\n        best_function",
        ),
        (
            _CHECKPOINTS,
            """        not hasattr(save_checkpoint, "best")
        or is_better(val_loss, save_checkpoint.best)
""",
            """        hasattr(save_checkpoint, "best")
        and is_better(val_loss, save_checkpoint.best)
""",
        ),
        (
            _CHECKPOINTS,
            """        extra_state.update({"best": save_checkpoint.best})
""",
            """        extra_state.update({"best": save_checkpoint.best})
    extra_state.update(early_stopping=dict(early_stopping), metric=_metric(cfg))
""",
        ),
        (
            _CHECKPOINTS,
            """    if (
        extra_state is not None
        and "best" in extra_state
        and not reset_optimizer
        and not reset_meters
    ):
        save_checkpoint.best = extra_state["best"]
""",
            """    # The best checkpoint is the best in its folder: a run that begins elsewhere has none yet.
    folders = (os.path.dirname(checkpoint_path), cfg.save_dir)
    goes_on = len({os.path.realpath(folder) for folder in folders}) == 1
    begins_anew = reset_optimizer or reset_meters or not goes_on
    _restore_validations(cfg, None if begins_anew else extra_state)
""",
        ),
        (
            _TRAIN,
            """    prev_best = getattr(should_stop_early, "best", None)
    if prev_best is None or is_better(valid_loss, prev_best):
        should_stop_early.best = valid_loss
        should_stop_early.num_runs = 0
        return False
    else:
        should_stop_early.num_runs += 1
        if should_stop_early.num_runs >= cfg.checkpoint.patience:
""",
            """    seen = checkpoint_utils.early_stopping
    if not math.isnan(valid_loss) and (
        seen["best"] is None or is_better(valid_loss, seen["best"])
    ):
        seen.update(best=valid_loss, num_runs=0)
        return False
    else:
        seen["num_runs"] += 1
        if seen["num_runs"] >= cfg.checkpoint.patience:
""",
        ),
    ],
    # --keep-best-checkpoints never removed those of negative losses, nor of infinite ones, and could not read the names
    # of those of a model in parts.
    "names_of_the_best": [
        (
            _CHECKPOINTS,
            "    if val_loss is not None and cfg.keep_best_checkpoints > 0:\n",
            """    best_pattern = r"checkpoint\\.best_{}_(-?\\d+\\.?\\d*){}\\.pt".format(
        re.escape(cfg.best_checkpoint_metric), re.escape(suffix)
    )
    if (
        val_loss is not None
        and math.isfinite(val_loss)
        and cfg.keep_best_checkpoints > 0
    ):
""",
        ),
        (
            _CHECKPOINTS,
            """        chkpts = checkpoint_paths(
            cfg.save_dir,
            pattern=r"checkpoint\\.best_{}_(\\d+\\.?\\d*){}\\.pt".format(
                cfg.best_checkpoint_metric, suffix
            ),
        )
        if len(chkpts) > 0:
            p = chkpts[-1] if cfg.maximize_best_checkpoint_metric else chkpts[0]
            worst_best = float(p.rsplit("_")[-1].replace("{}.pt".format(suffix), ""))
""",
            """        chkpts = checkpoint_paths(cfg.save_dir, pattern=best_pattern, keep_match=True)
        if len(chkpts) > 0:
            _, worst_best = chkpts[-1 if cfg.maximize_best_checkpoint_metric else 0]
""",
        ),
        (
            _CHECKPOINTS,
            """        checkpoints = checkpoint_paths(
            cfg.save_dir,
            pattern=r"checkpoint\\.best_{}_(\\d+\\.?\\d*){}\\.pt".format(
                cfg.best_checkpoint_metric, suffix
            ),
        )
        if not cfg.maximize_best_checkpoint_metric:
""",
            """        checkpoints = checkpoint_paths(cfg.save_dir, pattern=best_pattern)
        if not cfg.maximize_best_checkpoint_metric:
""",
        ),
    ],
    # A finished command that was given once more trained an update beyond --max-update, or another epoch after
    # --patience or --stop-time-hours had ended it, and wrote its checkpoint over checkpoint_last.pt.
    "finished_runs": [
        (
            _TRAIN,
            "    while epoch_itr.next_epoch_idx <= max_epoch:\n",
            "    why_done = why_finished(cfg, trainer)\n"
            "    if why_done:\n"
            '        logger.info(f"nothing to train: {why_done}")\n'
            "    while not why_done and epoch_itr.next_epoch_idx <= max_epoch:\n",
        ),
        (
            _TRAIN,
            "def should_stop_early(",
            '''def why_finished(cfg: DictConfig, trainer: Trainer) -> Optional[str]:
    """What had ended the run that is taken up; None for one that goes on."""
    updates, max_update = trainer.get_num_updates(), cfg.optimization.max_update
    if max_update and updates >= max_update:
        return f"{updates} updates are done of {max_update}"
    runs, patience = checkpoint_utils.early_stopping["num_runs"], cfg.checkpoint.patience
    if patience > 0 and runs >= patience:
        return f"the last {runs} validations brought nothing better; --patience is {patience}"
    # As it is in the checkpoint, the same for all processes.
    hours, stop = trainer._previous_training_time / (60 * 60), cfg.optimization.stop_time_hours
    if stop > 0 and hours > stop:
        return f"it has trained for {hours:.2f} hours; --stop-time-hours is {stop}"
    return None


def should_stop_early(''',
        ),
    ],
    # A checkpoint at the end of an epoch is written before the learning rate is told the validation loss, and of
    # reduce_lr_on_plateau none had the number of epochs in which the loss had not improved.
    "plateaus_in_checkpoints": [
        (
            _CHECKPOINTS,
            "    trainer.lr_step(epoch_itr.epoch)\n",
            """    ended = extra_state is not None and not (
        reset_dataloader or reset_optimizer or reset_lr_scheduler
    )
    ended = ended and itr_state.get("version", 1) >= 2 and epoch_itr.epoch > 1
    if ended and itr_state["iterations_in_epoch"] == 0:
        trainer.lr_step(epoch_itr.epoch - 1, extra_state.get("val_loss"))
    else:
        trainer.lr_step(epoch_itr.epoch)
""",
        ),
        (
            _PLATEAU,
            '            "last_epoch": self.lr_scheduler.last_epoch,\n',
            '            "last_epoch": self.lr_scheduler.last_epoch,\n'
            '            "num_bad_epochs": self.lr_scheduler.num_bad_epochs,\n',
        ),
        (
            _PLATEAU,
            '            self.lr_scheduler.last_epoch = state_dict["last_epoch"]\n',
            '            self.lr_scheduler.last_epoch = state_dict["last_epoch"]\n'
            '        self.lr_scheduler.num_bad_epochs = state_dict.get("num_bad_epochs", 0)\n',
        ),
        # It counts the losses that it was told; where a run was taken up, the epoch took that number's place.
        (
            _PLATEAU,
            "            self.lr_scheduler.step(val_loss)\n"
            "        else:\n            self.lr_scheduler.last_epoch = epoch\n",
            "            self.lr_scheduler.step(val_loss)\n",
        ),
    ],
}
