"""The tables of Choi 2024: what a Pythia passes on to a model with retention, and what of it stays frozen."""

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


def _400m(model: str, arch: str, *numbers: str, transfer: str = "") -> Row:
    return Row(f"400M, {model}", XATL_400M, f"{arch} {transfer}", numbers)


def _1b(model: str, arch: str, *numbers: str, transfer: str = "") -> Row:
    return Row(f"1B, {model}", XATL_1B, f"{arch} {transfer}", numbers)


def _frozen(transfer: str) -> str:
    return f"{_RETNET} {transfer} --freeze {transfer.split()[-1]}"


TABLES = {
    "choi-table2": Table(
        title="Choi 2024, Table 2: LAMBADA accuracy and the average of six tests, which weights are transferred",
        folder="xatl",
        measures=("LAMBADA", "average"),
        rows={
            "400m-scratch-mha": _400m("MHA", _MHA, "47.43", "45.99"),
            "400m-scratch-mamba": _400m("Mamba", _MAMBA, "43.49", "46.65"),
            "400m-scratch-retnet": _400m("RetNet", _RETNET, "44.63", "45.25"),
            "400m-scratch-hybrid": _400m("Hybrid RetNet", _HYBRID, "46.21", "46.60"),
            "400m-embeddings-mha": _400m("MHA, E_io", _MHA, "47.23", "46.12", transfer=_E_IO),
            "400m-embeddings-retnet": _400m("RetNet, E_io", _RETNET, "40.05", "44.94", transfer=_E_IO),
            "400m-ffn-mha": _400m("MHA, E_io + FFN", _MHA, "50.38", "47.98", transfer=_FFN),
            "400m-ffn-mamba": _400m("Mamba, E_io + FFN", _MAMBA, "49.72", "48.08", transfer=_FFN),
            "400m-ffn-retnet": _400m("RetNet, E_io + FFN", _RETNET, "48.81", "47.20", transfer=_FFN),
            "400m-ffn-hybrid": _400m("Hybrid RetNet, E_io + FFN", _HYBRID, "49.29", "47.91", transfer=_FFN),
            "400m-wo-mha": _400m("MHA, E_io + FFN + W_O", _MHA, "51.33", "48.30", transfer=_WO),
            "400m-wo-retnet": _400m("RetNet, E_io + FFN + W_O", _RETNET, "47.80", "46.96", transfer=_WO),
            "1b-scratch-retnet": _1b("RetNet", _RETNET_1B, "49.30", "48.18"),
            "1b-ffn-retnet": _1b("RetNet, E_io + FFN", _RETNET_1B, "51.47", "49.48", transfer=_FFN),
            "1b-attention-hybrid": _1b(
                "Hybrid RetNet, E_io + FFN + ATTN", _HYBRID_1B, "53.66", "50.76", transfer=f"{_FFN},attention"
            ),
        },
    ),
    # What is transferred into RetNet-430M stays frozen, always or for a time (LIT).
    "choi-table3": Table(
        title="Choi 2024, Table 3: LAMBADA accuracy and the average of six tests, what is transferred is frozen",
        folder="xatl",
        measures=("LAMBADA", "average"),
        rows={
            "wo-frozen": Row("E_io + FFN + W_O, frozen", XATL_400M, _frozen(_WO), ("33.55", "43.12")),
            "wo-lit": Row("E_io + FFN + W_O, LIT", XATL_400M, f"{_frozen(_WO)} {_LIT}", ("45.27", "47.02")),
            "ffn-frozen": Row("E_io + FFN, frozen", XATL_400M, _frozen(_FFN), ("39.78", "44.55")),
        },
    ),
}
