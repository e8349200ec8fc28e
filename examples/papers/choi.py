"""The tables of Choi 2024: a Pythia's weights in a model with retention, and those of them that stay frozen."""

from dataclasses import dataclass

from papers.language_models import XATL_1B, XATL_400M
from papers.rows import Row, Table

_E_IO = "--transfer-from SOURCE --transfer embeddings,output"
_FFN = f"{_E_IO},feed-forward"
_WO = f"{_FFN},output-projection"

_RETNET = "--arch fast_weight_lm_retnet_430m"
_MHA = "--arch fast_weight_lm_pythia_410m --softmax-attention-layers all"
_MAMBA = "--arch fast_weight_lm_stripedmamba_430m"
_HYBRID = f"{_RETNET} --softmax-attention-layers 2,12"
_RETNET_1B = "--arch fast_weight_lm_retnet_1b"
_HYBRID_1B = f"{_RETNET_1B} --softmax-attention-layers 2,8"
# The paper does not say how long an interval is; --unfreeze-interval N after OUT takes another.
_LIT = "--unfreeze-threshold 0.01 --unfreeze-patience 1 --unfreeze-interval 1000"


def _400m(model: str, arch: str, numbers: str, transfer: str = "") -> Row:
    return Row(f"400M, {model}", XATL_400M, f"{arch} {transfer}", tuple(numbers.split()))


def _1b(model: str, arch: str, numbers: str, transfer: str = "") -> Row:
    return Row(f"1B, {model}", XATL_1B, f"{arch} {transfer}", tuple(numbers.split()))


def _frozen(model: str, numbers: str, transfer: str, options: str = "") -> Row:
    frozen = f"{_RETNET} {transfer} --freeze {transfer.split()[-1]} {options}"
    return Row(model, XATL_400M, frozen, tuple(numbers.split()))


MEASURES = ("LAMBADA", "HellaSwag", "PIQA", "ARC-E", "ARC-C", "WinoGrande", "average")
"""Accuracies in percent. Those of HellaSwag and of ARC-C, ARC-Challenge, are normalised by the choices' lengths."""

TABLES = {
    "choi-table2": Table(
        title="Choi 2024, Table 2: accuracy in six tests, which weights are transferred",
        folder="xatl",
        measures=MEASURES,
        rows={
            "400m-scratch-mha": _400m("MHA", _MHA, "47.43 38.23 65.89 49.62 23.72 51.07 45.99"),
            "400m-scratch-mamba": _400m("Mamba", _MAMBA, "43.49 39.01 67.57 51.73 24.83 53.28 46.65"),
            "400m-scratch-retnet": _400m("RetNet", _RETNET, "44.63 36.67 65.29 50.13 24.40 50.36 45.25"),
            "400m-scratch-hybrid": _400m("Hybrid RetNet", _HYBRID, "46.21 37.83 66.32 50.29 25.51 53.43 46.60"),
            "400m-embeddings-mha": _400m("MHA, E_io", _MHA, "47.23 38.27 66.27 49.79 23.29 51.85 46.12", _E_IO),
            "400m-embeddings-retnet": _400m(
                "RetNet, E_io", _RETNET, "40.05 36.78 64.91 49.49 25.00 53.43 44.94", _E_IO
            ),
            "400m-ffn-mha": _400m("MHA, E_io + FFN", _MHA, "50.38 40.88 67.36 51.26 25.43 52.57 47.98", _FFN),
            "400m-ffn-mamba": _400m("Mamba, E_io + FFN", _MAMBA, "49.72 41.66 67.19 52.10 24.32 53.51 48.08", _FFN),
            "400m-ffn-retnet": _400m("RetNet, E_io + FFN", _RETNET, "48.81 39.92 66.38 50.55 24.74 52.80 47.20", _FFN),
            "400m-ffn-hybrid": _400m(
                "Hybrid RetNet, E_io + FFN", _HYBRID, "49.29 40.96 67.36 51.68 25.43 52.72 47.91", _FFN
            ),
            "400m-wo-mha": _400m("MHA, E_io + FFN + W_O", _MHA, "51.33 41.11 66.38 51.73 26.19 53.04 48.30", _WO),
            "400m-wo-retnet": _400m(
                "RetNet, E_io + FFN + W_O", _RETNET, "47.80 39.72 66.70 50.51 25.51 51.54 46.96", _WO
            ),
            "1b-scratch-retnet": _1b("RetNet", _RETNET_1B, "49.30 41.46 66.86 52.98 25.63 52.82 48.18"),
            "1b-ffn-retnet": _1b("RetNet, E_io + FFN", _RETNET_1B, "51.47 44.97 69.26 54.50 25.51 51.14 49.48", _FFN),
            "1b-attention-hybrid": _1b(
                "Hybrid RetNet, E_io + FFN + ATTN",
                _HYBRID_1B,
                "53.66 45.29 69.70 54.92 27.56 53.43 50.76",
                f"{_FFN},attention",
            ),
        },
    ),
    # The weights transferred into RetNet-430M stay frozen, always or for a time (LIT).
    "choi-table3": Table(
        title="Choi 2024, Table 3: accuracy in six tests, transferred weights frozen",
        folder="xatl",
        measures=MEASURES,
        rows={
            "wo-frozen": _frozen("E_io + FFN + W_O, frozen", "33.55 35.52 64.31 48.23 24.15 52.96 43.12", _WO),
            "wo-lit": _frozen("E_io + FFN + W_O, LIT", "45.27 39.35 67.90 51.47 25.94 52.17 47.02", _WO, _LIT),
            "ffn-frozen": _frozen("E_io + FFN, frozen", "39.78 37.66 65.67 49.62 23.98 50.59 44.55", _FFN),
        },
    ),
}


@dataclass(frozen=True)
class Compared:
    """A row of Table 4, where models are set beside published ones."""

    model: str  # in the paper's words
    tokens: str  # of its training
    numbers: str  # perplexity on LAMBADA, then `MEASURES`
    row: str | None = None  # of Table 2 that is the same model; None if others trained it


TABLE_4 = (
    Compared("Hybrid H3-360M", "300B", "89.48 25.77 31.70 64.20 44.40 24.20 50.60 40.10"),
    Compared("Pythia-410M", "300B", "10.84 51.40 40.60 66.90 52.10 24.60 53.80 48.20"),
    Compared("Mamba-370M", "300B", "8.14 55.60 46.50 69.50 55.10 28.00 55.30 50.00"),
    Compared("Pythia-410M", "150B", "11.38 49.99 40.18 66.87 50.55 24.06 53.51 47.53"),
    Compared("Pythia-410M-repr", "150B", "13.95 47.43 38.23 65.89 49.62 23.72 51.07 45.99", "400m-scratch-mha"),
    Compared("RetNet-430M-XATL", "150B", "12.24 48.81 39.92 66.38 50.55 24.74 52.80 47.20", "400m-ffn-retnet"),
    Compared("Hybrid RetNet-430M-XATL", "150B", "11.72 49.29 40.96 67.36 51.68 25.43 52.72 47.91", "400m-ffn-hybrid"),
    Compared("StripedMamba-430M-XATL", "150B", "11.31 49.72 41.66 67.19 52.10 24.32 53.51 48.08", "400m-ffn-mamba"),
    Compared("Pythia-1B", "300B", "7.92 56.10 47.20 70.70 57.00 27.10 53.50 51.90"),
    Compared("Mamba-790M", "300B", "6.02 62.70 55.10 72.10 61.20 29.50 56.10 57.10"),
    Compared("Pythia-1B", "100B", "9.24 54.30 42.02 68.99 53.83 25.68 52.09 49.49"),
    Compared("TinyLlama-1.1B", "100B", "15.33 44.25 43.50 68.12 50.80 24.32 53.28 47.38"),
    Compared("RetNet-1B-XATL", "100B", "9.73 51.47 44.97 69.26 54.50 25.51 51.14 49.48", "1b-ffn-retnet"),
    Compared("Hybrid RetNet-1B-XATL", "100B", "9.02 53.66 45.29 69.70 54.92 27.56 53.43 50.76", "1b-attention-hybrid"),
)
"""Of others the paper gives the numbers of Mamba's paper, or of their public checkpoints."""
