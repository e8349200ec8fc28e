"""Fast weight programmers for fairseq: what ``--user-dir fairseq_fastweights`` names.

Importing the package makes checkpoints that hold an `argparse.Namespace` (all of fairseq's before version 0.10, and
some later ones) loadable by PyTorch's safe loader, which refuses every class that it was not told of. Nothing else of
fairseq or PyTorch is changed.
"""

import argparse

import torch

torch.serialization.add_safe_globals([argparse.Namespace])
