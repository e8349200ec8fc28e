"""The tables of Schlag et al. 2021: WMT14 English-German, and WikiText-103."""

from papers.language_models import MEDIUM, MEDIUM_CARRIED, SMALL, transformer_xl
from papers.rows import Row, Table
from papers.translation import TRANSLATION


def _translation(model: str, valid: str, test: str, feature_map: str = "") -> Row:
    arch = "--arch fast_weight_transformer_wmt_en_de_big --share-all-embeddings"
    fast = "--fast-weight-attention encoder,decoder,cross --update-rule sum --normalization attention --feature-map"
    options = f"{fast} {feature_map}" if feature_map else "--fast-weight-attention none"
    return Row(model, TRANSLATION, f"{arch} {options}", (valid, test))


# As the authors' program has them: softmax attention has no biases, the sum rule has sum normalisation besides, and
# FAVOR+ is that of `favor-schlag`.
_SOFTMAX = "--softmax-attention-layers all --projection-bias none"
_SUM = "--update-rule sum --feature-map elu --normalization sum,attention"
_DELTA = "--update-rule delta --feature-map elu --normalization sum"
_PERFORMER_SUM = "--update-rule sum --feature-map favor-schlag --normalization sum,attention --favor-features"
_PERFORMER_DELTA = "--update-rule delta --feature-map favor-schlag --normalization sum --favor-features"
_DPFP_SUM = "--update-rule sum --feature-map dpfp --normalization sum,attention --dpfp-nu"
_DPFP_DELTA = "--update-rule delta --feature-map dpfp --normalization sum --dpfp-nu"
# For the delta rule the paper's attention normalisation is both of its equations, 27 and 28.
_BOTH = "--update-rule delta --feature-map elu --normalization sum,attention,removal"
_WITHOUT = "--no-token-positional-embeddings"
_CARRIED_SUM = f"--update-rule sum --feature-map elu {_WITHOUT} --normalization"
_CARRIED_DELTA = f"--update-rule delta --feature-map elu {_WITHOUT} --normalization"


def _xl(size: str, memory: int, target: int, *numbers: str) -> Row:
    options = f"--mixers transformer-xl --transformer-xl-memory 384 {_WITHOUT}"
    return Row(f"Transformer-XL, {size} M", transformer_xl(memory, target), options, numbers)


TABLES = {
    "schlag-table1": Table(
        title="Schlag et al. 2021, Table 1: BLEU on WMT14 English-German",
        folder="wmt14",
        measures=("valid", "test"),
        rows={
            # Features: d_dot = 2 m or 2 nu d_key, with d_key = 64.
            "standard": _translation("Transformer", "26.6", "27.7"),
            "linear": _translation("Linear Transformer", "25.5", "26.8", "elu"),
            "performer-64": _translation("Performer, m = 32", "24.2", "24.4", "favor-schlag --favor-features 32"),
            "performer-256": _translation("Performer, m = 128", "24.9", "25.3", "favor-schlag --favor-features 128"),
            # Table 6 has d_dot = 384, without a result in Table 1.
            "performer-384": _translation("Performer, m = 192", "–", "–", "favor-schlag --favor-features 192"),
            "performer-512": _translation("Performer, m = 256", "26.7", "27.7", "favor-schlag --favor-features 256"),
            "dpfp-256": _translation("DPFP, nu = 2", "26.2", "26.9", "dpfp --dpfp-nu 2"),
            "dpfp-384": _translation("DPFP, nu = 3", "–", "–", "dpfp --dpfp-nu 3"),
            "dpfp-512": _translation("DPFP, nu = 4", "26.2", "27.1", "dpfp --dpfp-nu 4"),
        },
    ),
    "schlag-table2": Table(
        title="Schlag et al. 2021, Table 2: perplexity on WikiText-103, the update rule in two sizes",
        folder="wikitext103",
        measures=("valid", "test"),
        rows={
            "small-transformer": Row("Transformer", SMALL, _SOFTMAX, ("33.0", "34.1")),
            "small-linear-transformer": Row("Linear Transformer", SMALL, _SUM, ("37.1", "38.3")),
            "small-delta-network": Row("Delta Network", SMALL, _DELTA, ("34.1", "35.5")),
            "small-performer-sum": Row("Performer, m = 8, sum", SMALL, f"{_PERFORMER_SUM} 8", ("39.0", "39.6")),
            "small-performer-delta": Row("Performer, m = 8, delta", SMALL, f"{_PERFORMER_DELTA} 8", ("36.1", "37.2")),
            "medium-transformer": Row("Transformer", MEDIUM, _SOFTMAX, ("27.9", "29.6")),
            "medium-linear-transformer": Row("Linear Transformer", MEDIUM, _SUM, ("31.1", "33.0")),
            "medium-delta-network": Row("Delta Network", MEDIUM, _DELTA, ("29.7", "31.5")),
            "medium-performer-sum": Row("Performer, m = 16, sum", MEDIUM, f"{_PERFORMER_SUM} 16", ("32.2", "33.8")),
            "medium-performer-delta": Row(
                "Performer, m = 16, delta", MEDIUM, f"{_PERFORMER_DELTA} 16", ("30.0", "31.8")
            ),
        },
    ),
    "schlag-table3": Table(
        title="Schlag et al. 2021, Table 3: perplexity on WikiText-103, the medium Delta Network with and without",
        folder="wikitext103",
        measures=("valid", "test"),
        rows={
            "positions-yes-normalization-yes": Row(
                "positions, attention normalisation", MEDIUM, _BOTH, ("30.4", "32.1")
            ),
            "positions-no-normalization-yes": Row(
                "attention normalisation", MEDIUM, f"{_BOTH} {_WITHOUT}", ("29.2", "31.2")
            ),
            "positions-yes-normalization-no": Row("positions", MEDIUM, _DELTA, ("29.7", "31.5")),
            "positions-no-normalization-no": Row("neither", MEDIUM, f"{_DELTA} {_WITHOUT}", ("28.1", "31.1")),
        },
    ),
    "schlag-table4": Table(
        title="Schlag et al. 2021, Table 4: perplexity on WikiText-103, the context not truncated",
        folder="wikitext103",
        measures=("valid", "test"),
        rows={
            "linear-transformer": Row(
                "Linear Transformer, 0.13 M", MEDIUM_CARRIED, f"{_CARRIED_SUM} sum,attention", ("> 260", "> 260")
            ),
            "delta-network": Row("Delta Network, 0.13 M", MEDIUM_CARRIED, f"{_CARRIED_DELTA} sum", ("27.8", "29.4")),
            # Of the paper's first version.
            "linear-transformer-no-normalization": Row(
                "Linear Transformer, sum normalisation, 0.13 M", MEDIUM_CARRIED, f"{_CARRIED_SUM} sum", ("1600", "1600")
            ),
            # One and the same training, scored four times.
            "transformer-xl-15": _xl("0.13", 15, 1, "65.7", "65.5"),
            "transformer-xl-64": _xl("1.05", 64, 64, "29.3", "30.1"),
            "transformer-xl-128": _xl("2.10", 128, 128, "26.4", "27.4"),
            "transformer-xl-384": _xl("6.29", 384, 384, "24.6", "25.5"),
        },
    ),
    "schlag-table5": Table(
        title="Schlag et al. 2021, Table 5: perplexity on WikiText-103, small, more features than capacity needs",
        folder="wikitext103",
        measures=("valid", "test"),
        rows={
            "performer-sum": Row("Performer, m = 16, sum", SMALL, f"{_PERFORMER_SUM} 16", ("38.0", "38.8")),
            "performer-delta": Row("Performer, m = 16, delta", SMALL, f"{_PERFORMER_DELTA} 16", ("36.0", "37.0")),
            "dpfp-sum": Row("DPFP, nu = 1, sum", SMALL, f"{_DPFP_SUM} 1", ("37.7", "38.8")),
            "dpfp-delta": Row("DPFP, nu = 1, delta", SMALL, f"{_DPFP_DELTA} 1", ("33.9", "35.0")),
            # Of which the paper says that they were "not beneficial", without numbers.
            "performer-sum-m-32": Row("Performer, m-32, sum", SMALL, f"{_PERFORMER_SUM} 32", ("–", "–")),
            "performer-delta-m-32": Row("Performer, m-32, delta", SMALL, f"{_PERFORMER_DELTA} 32", ("–", "–")),
            "dpfp-sum-nu-2": Row("DPFP, nu-2, sum", SMALL, f"{_DPFP_SUM} 2", ("–", "–")),
            "dpfp-delta-nu-2": Row("DPFP, nu-2, delta", SMALL, f"{_DPFP_DELTA} 2", ("–", "–")),
        },
    ),
}
