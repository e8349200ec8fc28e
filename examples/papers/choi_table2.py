"""Table 2 of Choi 2024: what a Pythia passes on to a model with retention."""

from papers.language_models import XATL_1B, XATL_400M
from papers.rows import Row, Table

E_IO = "--transfer-from SOURCE --transfer embeddings,output"
FFN = f"{E_IO},feed-forward"
WO = f"{FFN},output-projection"
_ATTENTION = f"{FFN},attention"

RETNET_400M = "--arch fast_weight_lm_retnet_430m"
_MHA_400M = "--arch fast_weight_lm_pythia_410m --softmax-attention-layers all"
_MAMBA_400M = "--arch fast_weight_lm_stripedmamba_430m"
_HYBRID_400M = f"{RETNET_400M} --softmax-attention-layers 2,12"
_RETNET_1B = "--arch fast_weight_lm_retnet_1b"
_HYBRID_1B = f"{_RETNET_1B} --softmax-attention-layers 2,8"


def _400m(model: str, arch: str, *numbers: str, transfer: str = "") -> Row:
    return Row(f"400M, {model}", XATL_400M, f"{arch} {transfer}", numbers)


def _1b(model: str, arch: str, *numbers: str, transfer: str = "") -> Row:
    return Row(f"1B, {model}", XATL_1B, f"{arch} {transfer}", numbers)


TABLE = Table(
    title="Choi 2024, Table 2: LAMBADA accuracy and the average of six tests, which weights are transferred",
    folder="xatl",
    measures=("LAMBADA", "average"),
    rows={
        "400m-scratch-mha": _400m("MHA", _MHA_400M, "47.43", "45.99"),
        "400m-scratch-mamba": _400m("Mamba", _MAMBA_400M, "43.49", "46.65"),
        "400m-scratch-retnet": _400m("RetNet", RETNET_400M, "44.63", "45.25"),
        "400m-scratch-hybrid": _400m("Hybrid RetNet", _HYBRID_400M, "46.21", "46.60"),
        "400m-embeddings-mha": _400m("MHA, E_io", _MHA_400M, "47.23", "46.12", transfer=E_IO),
        "400m-embeddings-retnet": _400m("RetNet, E_io", RETNET_400M, "40.05", "44.94", transfer=E_IO),
        "400m-ffn-mha": _400m("MHA, E_io + FFN", _MHA_400M, "50.38", "47.98", transfer=FFN),
        "400m-ffn-mamba": _400m("Mamba, E_io + FFN", _MAMBA_400M, "49.72", "48.08", transfer=FFN),
        "400m-ffn-retnet": _400m("RetNet, E_io + FFN", RETNET_400M, "48.81", "47.20", transfer=FFN),
        "400m-ffn-hybrid": _400m("Hybrid RetNet, E_io + FFN", _HYBRID_400M, "49.29", "47.91", transfer=FFN),
        "400m-wo-mha": _400m("MHA, E_io + FFN + W_O", _MHA_400M, "51.33", "48.30", transfer=WO),
        "400m-wo-retnet": _400m("RetNet, E_io + FFN + W_O", RETNET_400M, "47.80", "46.96", transfer=WO),
        "1b-scratch-retnet": _1b("RetNet", _RETNET_1B, "49.30", "48.18"),
        "1b-ffn-retnet": _1b("RetNet, E_io + FFN", _RETNET_1B, "51.47", "49.48", transfer=FFN),
        "1b-attention-hybrid": _1b(
            "Hybrid RetNet, E_io + FFN + ATTN", _HYBRID_1B, "53.66", "50.76", transfer=_ATTENTION
        ),
    },
)
