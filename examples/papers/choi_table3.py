"""Table 3 of Choi 2024: what is transferred into RetNet-430M stays frozen, always or for a time (LIT)."""

from papers.choi_table2 import FFN, RETNET_400M, WO
from papers.language_models import XATL_400M
from papers.rows import Row, Table


def _frozen(transfer: str) -> str:
    return f"{RETNET_400M} {transfer} --freeze {transfer.split()[-1]}"


# The paper does not say how long an interval is; --unfreeze-interval N after OUT takes another.
_LIT = "--unfreeze-threshold 0.01 --unfreeze-patience 1 --unfreeze-interval 1000"

TABLE = Table(
    title="Choi 2024, Table 3: LAMBADA accuracy and the average of six tests, what is transferred is frozen",
    folder="xatl",
    measures=("LAMBADA", "average"),
    rows={
        "wo-frozen": Row("E_io + FFN + W_O, frozen", XATL_400M, _frozen(WO), ("33.55", "43.12")),
        "wo-lit": Row("E_io + FFN + W_O, LIT", XATL_400M, f"{_frozen(WO)} {_LIT}", ("45.27", "47.02")),
        "ffn-frozen": Row("E_io + FFN, frozen", XATL_400M, _frozen(FFN), ("39.78", "44.55")),
    },
)
