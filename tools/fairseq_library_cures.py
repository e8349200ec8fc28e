"""Where fairseq relies on what today's PyTorch does otherwise, or on a library that need not be there.

Each row of a cure: a file, what stands there, and what takes its place (`fairseq_cures.Edit`).
"""

_ATTENTION = "fairseq/modules/multihead_attention.py"
_FILES = "fairseq/file_io.py"

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
}
