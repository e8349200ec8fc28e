"""Where fairseq relies on what today's PyTorch does otherwise or slowly, or on a library that need not be there.

Each row of a cure: a file, what stands there, and what takes its place (`fairseq_cures.Edit`).
"""

_ATTENTION = "fairseq/modules/multihead_attention.py"
_FILES = "fairseq/file_io.py"
_DROPOUT = "fairseq/modules/fairseq_dropout.py"
_PROGRESS = "fairseq/logging/progress_bar.py"

LIBRARY_CURES: dict[str, list[tuple[str, str, str]]] = {
    # Masks of bytes, which fairseq's attention documents; torch >= 2 takes them no longer.
    "masks_of_bytes": [
        (
            _ATTENTION,
            "        if need_head_weights:\n            need_weights = True\n\n        is_tpu",
            """        if need_head_weights:
            need_weights = True
        if key_padding_mask is not None and key_padding_mask.dtype == torch.uint8:
            key_padding_mask = key_padding_mask.to(torch.bool)
        if attn_mask is not None and attn_mask.dtype == torch.uint8:
            attn_mask = attn_mask.to(torch.bool)

        is_tpu""",
        ),
        (_ATTENTION, 'masked_fill_(mask, -float("inf"))', 'masked_fill_(mask.to(torch.bool), -float("inf"))'),
    ],
    # Where iopath is not installed, files that were to be written in the background were an AttributeError. They are
    # written at once, and there is nothing to wait for.
    "files_without_iopath": [
        (
            _FILES,
            """                logging.exception("Failed to initialize ioPath PathManager object.")
        return IOPathManager""",
            """                logging.warning(f"{path} is not written in the background: iopath is not installed")
                return open(path, mode, buffering, encoding, errors, newline)
        return IOPathManager""",
        ),
        (
            _FILES,
            "            return IOPathManager.async_close()\n        return False",
            "            return IOPathManager.async_close()\n        return True",
        ),
    ],
    # On a CPU torch makes a draw of random bits for each number that dropout may take out: a seventh of the time in
    # which a small model trains. 16 bits are enough, and one draw has those of four numbers. Compiled layers draw their
    # own.
    "dropout_of_16_bits": [
        (_DROPOUT, "\nimport torch.nn as nn\n", "\nimport torch\nimport torch.nn as nn\n"),
        (
            _DROPOUT,
            "\n\nclass FairseqDropout(",
            '''

def drop_out(x, p: float):
    """F.dropout on a CPU, p rounded to a multiple of 2^-16"""

    lost = round(p * 2**16)
    if lost == 2**16:
        return torch.zeros_like(x)
    bits = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
    bits = bits.view(torch.int16)[: x.numel()].view(x.shape)
    kept = torch.ge(bits, lost - 2**15, out=torch.empty(x.shape, dtype=x.dtype))
    return x * kept.mul_(2**16 / (2**16 - lost))


class FairseqDropout(''',
        ),
        (
            _DROPOUT,
            "            return F.dropout(",
            """            if not torch.jit.is_scripting():
                if x.device.type == "cpu" and not torch.compiler.is_compiling():
                    return drop_out(x, self.p)
            return F.dropout(""",
        ),
    ],
    # wandb and TensorBoard were imported by every command where they are installed: a second more, and the end of it if
    # that fails, as of a release that does not fit what else is installed.
    "recorders_when_asked_for": [
        (
            _PROGRESS,
            """try:
    _tensorboard_writers = {}
    from torch.utils.tensorboard import SummaryWriter
except ImportError:
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        SummaryWriter = None
""",
            """_tensorboard_writers = {}
SummaryWriter = None
""",
        ),
        (
            _PROGRESS,
            """        if SummaryWriter is None:
            logger.warning(
                "tensorboard not found, please install with: pip install tensorboard"
            )
""",
            """        global SummaryWriter
        if SummaryWriter is None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except Exception as error:
                try:
                    from tensorboardX import SummaryWriter
                except Exception:
                    logger.warning(
                        f"tensorboard_logdir is {tensorboard_logdir}, but tensorboard cannot be "
                        f"imported and nothing is written there: {error}; pip install tensorboard"
                    )
""",
        ),
        (
            _PROGRESS,
            """try:
    import wandb
except ImportError:
    wandb = None
""",
            "wandb = None\n",
        ),
        # Each validation began a run, of which wandb left an empty folder before it returned the one that there was.
        (
            _PROGRESS,
            """        if wandb is None:
            logger.warning("wandb not found, pip install wandb")
            return

        # reinit=False to ensure if wandb.init() is called multiple times
        # within one process it still references the same run
        wandb.init(project=wandb_project, reinit=False, name=run_name)
""",
            """        global wandb
        if wandb is None:
            try:
                import wandb
            except Exception as error:
                logger.warning(
                    f"wandb_project is {wandb_project}, but wandb cannot be imported and nothing "
                    f"is sent there: {error}; pip install wandb"
                )
                return
        if wandb.run is None:
            wandb.init(project=wandb_project, name=run_name)
""",
        ),
    ],
}
