"""Fast weight programmers for fairseq: the package for ``--user-dir fairseq_fastweights``.

Importing it lets PyTorch's safe loader read checkpoints that hold an `argparse.Namespace`: all of fairseq's before
version 0.10, and some later ones. It changes nothing else of fairseq or PyTorch.
"""

import argparse

import torch

torch.serialization.add_safe_globals([argparse.Namespace])
