"""The papers' tables, scaled down to hours of two CPU cores. `reproduce.py run` trains and scores them."""

from __future__ import annotations

from dataclasses import replace

from papers.language_models import LanguageModel
from papers.rows import Row, Table, read_claims
from papers.translation import Translation

# Schlag et al. 2021, Table 1, on Multi30k: 30 epochs, at whose end the learning rate is 0.
_MULTI30K = Translation(
    "--cpu --num-workers 0 --arch fast_weight_transformer_multi30k_en_de --share-all-embeddings --max-tokens-valid 4096"
    " --optimizer adam --adam-betas '(0.9, 0.98)' --dropout 0.2"
    " --lr 0.004 --lr-scheduler cosine --warmup-updates 500 --warmup-init-lr 1e-07 --max-update 4110"
    " --criterion label_smoothed_cross_entropy --label-smoothing 0.1",
    tokens=4096,
    generate="--cpu",
)


def _multi30k(model: str, options: str, numbers: str) -> Row:
    return Row(model, _MULTI30K, options, tuple(numbers.split()), seeds=(1, 2, 3))


# Of words, with adaptive input and softmax: in 4,000 subwords a text is 1.36 times as long, trained no faster by the
# word, and learnt more slowly.
_WORDS = (
    "--cpu --num-workers 0 --decoder-layers 4 --decoder-ffn-embed-dim 512"
    " --adaptive-input-cutoff 2000,10000 --adaptive-softmax-cutoff 2000,10000 --criterion adaptive_loss"
    " --ddp-backend legacy_ddp --optimizer adam --clip-norm 0.25 --lr-scheduler cosine"
)

# Schlag et al. 2021, Tables 2 to 4, on WikiText-2: 5 epochs, at whose end the learning rate is 0. In batches of 8 a
# model learns less from a text.
_WIKITEXT2 = LanguageModel(
    f"--arch fast_weight_lm_wiki103_small {_WORDS} --dropout 0.1 --lr 0.002 --warmup-updates 500 --max-update 10200",
    batch=4,
    length=256,
    modes=("context-192", "carried"),
    splits="test",
    evaluate="--cpu",
    counts_state=True,
)
# Softmax attention and the Linformer have no state of one size to carry.
_WINDOWS = replace(_WIKITEXT2, modes=("context-192",))
_CARRIED = replace(_WIKITEXT2, options=f"{_WIKITEXT2.options} --no-token-positional-embeddings --carry-over-state")


def _wikitext2(
    model: str, options: str, numbers: str = "– –", recipe: LanguageModel = _WIKITEXT2, seeds: int = 3
) -> Row:
    return Row(model, recipe, options, tuple(numbers.split()), tuple(range(1, seeds + 1)))


# Schlag et al. 2021, Table 4: ways to train states that are carried over, in models so small that three seeds of each
# row take minutes. Their windows are as short as the segments; a stream is as long as 636 of them.
_STATES = LanguageModel(
    "--cpu --num-workers 0 --arch fast_weight_lm --no-token-positional-embeddings --decoder-layers 2"
    " --decoder-embed-dim 64 --decoder-input-dim 64 --decoder-output-dim 64 --decoder-ffn-embed-dim 256"
    " --decoder-attention-heads 4 --share-decoder-input-output-embed --optimizer adam --clip-norm 0.25"
    " --lr 0.004 --lr-scheduler cosine --warmup-updates 25 --max-update 500",
    batch=16,
    length=64,
    modes=("context-32", "carried"),
    splits="test",
    evaluate="--cpu",
)


def _states() -> dict[str, Row]:
    """Each rule trained in windows, with its state carried over, and with states that are emptied by chance."""
    ways = {"": "", "-carried": " --carry-over-state"}
    ways["-reset"] = f"{ways['-carried']} --reset-state-probability 0.02"
    titles = {"": "in windows", "-carried": "carried over", "-reset": "carried over, emptied by chance"}
    return {
        f"{rule}{way}": Row(
            f"{rule.replace('-', ' ')}, {titles[way]}", _STATES, f"--mixers {rule}{options}", (), (1, 2, 3)
        )
        for rule in ("delta", "gated-delta", "gated")
        for way, options in ways.items()
    }


# Mao 2022, Table 2, on the same text: a Transformer, trained for 8,000 updates, and its conversion in a tenth of
# that, or three tenths, with linear attention in its attention's place.
_CONVERSION = (
    f"--arch fast_weight_lm_baevski_wiki103 {_WORDS} --decoder-attention-heads 4 --decoder-embed-dim 128"
    " --decoder-input-dim 128 --decoder-output-dim 128 --adaptive-input-factor 2 --adaptive-softmax-factor 2"
    " --dropout 0.1"
)
_SOURCE = LanguageModel(
    f"{_CONVERSION} --lr 0.002 --warmup-updates 400 --max-update 8000",
    batch=4,
    length=256,
    modes=("context-128",),
    splits="test",
    evaluate="--cpu",
    becomes_source=True,
)


def _converted(
    model: str,
    memory: str,
    number: str = "–",
    *,
    start: str = "--transfer-from SOURCE",
    source: str | None = "source",
    updates: int = 800,
    schedule: str = "--lr 0.001",
    becomes_source: bool = False,
) -> Row:
    """`memory`: options of the row. `start`: those that name the model it begins from, of the row `source`.
    `becomes_source`: whether others begin from it, for which one seed is enough."""
    schedule = f"{schedule} --warmup-updates {updates // 20} --max-update {updates}"
    recipe = replace(
        _SOURCE,
        options=f"{_CONVERSION} {start} {schedule} --validate-interval-updates {updates // 2}",
        sources=source is not None,
        becomes_source=becomes_source,
    )
    seeds = (1,) if becomes_source else (1, 2, 3)
    return Row(f"{model}, {updates:,} updates", recipe, memory, (number,), seeds, source)


def _memory(rule: str, size: int = 16, feature_map: str = "identity", normalization: str = "none") -> str:
    return (
        f"--update-rule {rule} --feature-dim {size} --feature-map {feature_map} --normalization {normalization}"
        f"{' --scale-read-out' if rule in ('decay', 'gated') else ''}"
    )


# Learnt features and attention's normalisation, as in LoLCATs (Zhang et al. 2024).
_LINEAR = _memory("sum", 32, "relu", "attention")
_TRANSFER = "--criterion attention_transfer --clip-norm 0 --dropout 0 --attention-dropout 0"


# SmolLM2-135M-Instruct with other mixers in some of its layers, or all.
# As from-huggingface writes it to options.txt.
_SHAPE = (
    "--arch fast_weight_lm --decoder-layers 30 --decoder-embed-dim 576 --decoder-input-dim 576 --decoder-output-dim 576"
    " --decoder-ffn-embed-dim 1536 --decoder-attention-heads 9 --kv-heads 3 --decoder-normalize-before"
    " --no-scale-embedding --share-decoder-input-output-embed --max-target-positions 8192 --mask-special-symbols"
    " --no-token-positional-embeddings --dropout 0 --attention-dropout 0 --rms-norm-eps 1e-05 --swiglu"
    " --projection-bias none --rotary-dim 64 --rotary-base 100000.0"
)
_TRANSFERRED, _TUNED = 48, 16
_SMOLLM2 = LanguageModel(
    "",
    batch=2,
    length=512,
    modes=("context-0",),
    splits="test",
    evaluate="--cpu --batch-size 2",
    sources=True,
)
_SMOLLM2_TEST = "test, context-0"

_MIXERS = {
    "window-sum": ("window-sum", "", "0.003"),
    "gated-delta": (
        "gated delta",
        "--gated-delta-bias --gated-delta-kv-heads 3 --gated-delta-gate-rank 64",
        "0.003",
    ),
    "sum": ("LoLCATs's sum", "--feature-map relu --normalization attention", "0.01"),
    "gated": ("gated", "--feature-map relu --normalization attention", "0.01"),
    "delta": ("delta", "--feature-map relu --normalization sum", "0.01"),
}
"""For people, options, and the learning rate of attention transfer."""
_LAYERS = {6: "5,10,15,20,25,30", 12: "3,5,8,10,13,15,18,20,23,25,28,30", 30: "1-30"}
"""Those that get another mixer, by their number."""


def _smollm2(start: str, updates: int, schedule: str, becomes_source: bool = False) -> LanguageModel:
    """`start`: options that name the model it begins from. `becomes_source`: whether others begin from it."""
    schedule = f"--optimizer adam {schedule} --max-update {updates}"
    # A training of minutes is saved at its end alone, for its model.
    ends = f"--validate-interval-updates {updates} --no-last-checkpoints --no-save-optimizer-state"
    options = f"--cpu --num-workers 0 {_SHAPE} {start} {schedule} {ends}"
    return replace(_SMOLLM2, options=options, becomes_source=becomes_source)


def _cosine(lr: str) -> str:
    return f"--lr {lr} --lr-scheduler cosine --warmup-updates 2"


_FINE_TUNING = _smollm2("--finetune-from-model SOURCE --clip-norm 1", _TUNED, _cosine("0.0001"))


def _with_mixer(mixer: str, layers: int, seeds: tuple[int, ...]) -> dict[str, Row]:
    """After attention transfer alone, and fine-tuned from there."""
    words, flags, lr = _MIXERS[mixer]
    name, title = f"{mixer}-{layers}", f"{words} in {f'{layers} of' if layers < 30 else 'all'} 30 layers"
    mixers = f"--mixers softmax,{mixer}:{_LAYERS[layers]} {flags}"
    start = "--transfer-from SOURCE --criterion attention_transfer"
    transfer = _smollm2(start, _TRANSFERRED, _cosine(lr), becomes_source=True)
    return {
        f"{name}-transfer": Row(f"{title}, attention transfer", transfer, mixers, (), seeds),
        name: Row(f"{title}, fine-tuned", _FINE_TUNING, mixers, (), source=f"{name}-transfer"),
    }


def _smollm2_rows() -> dict[str, Row]:
    # One update that changes nothing: the source, as a row that is scored like the others.
    copied = _smollm2("--transfer-from SOURCE", 1, "--lr 0 --lr-scheduler fixed")
    rows = {
        "source": Row("the source", copied, "--mixers softmax", ()),
        "source-tuned": Row("the source, fine-tuned", _FINE_TUNING, "--mixers softmax", ()),
    }
    for layers in _LAYERS:
        for mixer in _MIXERS:
            best = layers == 6 and mixer in ("window-sum", "gated-delta")
            rows |= _with_mixer(mixer, layers, (1, 2, 3) if best else (1,))
    return rows


SCALED = {
    "multi30k": Table(
        title="Schlag et al. 2021, Table 1, scaled down: BLEU on Multi30k, English to German",
        folder="wmt14",
        measures=("valid BLEU, WMT14", "test BLEU, WMT14"),
        # As many features for a head's dimensions as in those of the paper's models that have 256, 4 for each.
        rows={
            "softmax": _multi30k("softmax", "--fast-weight-attention none", "26.6 27.7"),
            "dpfp": _multi30k("DPFP, nu = 2", "--feature-map dpfp --dpfp-nu 2", "26.2 26.9"),
            "linear": _multi30k("linear (ELU + 1)", "--feature-map elu", "25.5 26.8"),
            "favor": _multi30k("FAVOR+, m = 64", "--feature-map favor --favor-features 64", "24.9 25.3"),
        },
        claims=read_claims(
            "test BLEU",
            """
            softmax reaches 38 BLEU: softmax >= 38
            DPFP is within 1.5 BLEU of softmax: softmax - dpfp <= 1.5
            softmax is ahead of DPFP: softmax - dpfp >= 0
            DPFP is ahead of linear: dpfp - linear >= 0
            linear is ahead of FAVOR+: linear - favor >= 0
            """,
        ),
    ),
    "wikitext2": Table(
        title="Schlag et al. 2021, Tables 2 to 4, scaled down: perplexity on WikiText-2",
        folder="wikitext103",
        measures=("valid, WikiText-103", "test, WikiText-103"),
        rows={
            "softmax": _wikitext2("softmax", "--softmax-attention-layers all", "33.0 34.1", _WINDOWS),
            "sum": _wikitext2("sum", "--update-rule sum", "37.1 38.3"),
            "delta": _wikitext2("delta", "--update-rule delta", "34.1 35.5"),
            "sum-carried": _wikitext2("sum, carried over", "--update-rule sum", recipe=_CARRIED),
            "delta-carried": _wikitext2("delta, carried over", "--update-rule delta", recipe=_CARRIED),
            "decay": _wikitext2("decay", "--mixers decay", seeds=1),
            "gated": _wikitext2("gated", "--mixers gated", seeds=1),
            "retention": _wikitext2("retention", "--mixers retention", seeds=1),
            "gated-delta": _wikitext2("gated delta", "--mixers gated-delta", seeds=1),
            "kimi-delta": _wikitext2("Kimi delta", "--mixers kimi-delta", seeds=1),
            "delta-product": _wikitext2("DeltaProduct, two writes", "--mixers delta-product", seeds=1),
            "delta-no-positions": _wikitext2(
                "delta, no positional embeddings", "--update-rule delta --no-token-positional-embeddings", seeds=1
            ),
            # The order of batches of a state that is carried over, without carrying it over.
            "delta-in-order": _wikitext2(
                "delta, no positional embeddings, batches in the text's order",
                "--update-rule delta --no-token-positional-embeddings --curriculum 5",
                seeds=1,
            ),
            "mamba": _wikitext2("Mamba", "--mixers mamba", seeds=1),
            "local": _wikitext2("local attention, window 32", "--mixers local", seeds=1),
            "abc": _wikitext2("ABC, 2 x 32 slots", "--mixers abc", seeds=1),
            "linformer": _wikitext2("Linformer, 2 x 64 slots", "--mixers linformer", recipe=_WINDOWS, seeds=1),
            "transformer-xl-carried": _wikitext2(
                "Transformer-XL, carried over",
                "--mixers transformer-xl --transformer-xl-memory 256",
                recipe=_CARRIED,
                seeds=1,
            ),
        },
        claims=read_claims(
            "test, context-192",
            """
            softmax is ahead of delta: delta - softmax >= 0
            delta is ahead of sum: sum - delta >= 0
            delta, carried over, is no worse than in windows: delta-carried@carried - delta <= 0
            sum, carried over, is worse than in windows: sum-carried@carried - sum >= 0
            delta is worse for batches in the text's order: delta-in-order - delta-no-positions >= 0
            """,
            carried="test, carried",
        ),
    ),
    "carried": Table(
        title="Schlag et al. 2021, Table 4, scaled down: states that are carried over, on a part of WikiText-2",
        folder="wikitext103",
        measures=(),
        rows=_states(),
        claims=read_claims(
            "test, carried",
            """
            delta, carried over, is no worse than in windows: delta-carried - delta@short <= 0
            delta, emptied by chance, is no worse than in windows: delta-reset - delta@short <= 0
            gated delta, carried over, is no worse than in windows: gated-delta-carried - gated-delta@short <= 0
            gated, carried over, is no worse than in windows: gated-carried - gated@short <= 0
            delta is better as one stream for states emptied by chance: delta-carried - delta-reset >= 0
            delta is better in windows for states emptied by chance: delta-carried@short - delta-reset@short >= 0
            """,
            short="test, context-32",
        ),
    ),
    "conversion": Table(
        title="Mao 2022, Table 2, scaled down: perplexity on WikiText-2 of a converted Transformer, m = 16",
        folder="finetuning",
        measures=("valid, GPT-2 on The Pile",),
        rows={
            "source": Row("the Transformer", _SOURCE, "--softmax-attention-layers all", ("14.5",)),
            **{
                f"{name}-{updates}": _converted(name, _memory(rule), number, updates=updates)
                for updates in (800, 2400)
                for name, rule, number in (("decay", "decay", "16.1"), ("gated", "gated", "16.8"), ("add", "sum", "–"))
            },
            "delta-800": _converted("delta", _memory("delta", 16, "relu", "sum")),
            "decay-m4": _converted("decay, m = 4", _memory("decay", 4), "17.1"),
            "gated-m4": _converted("gated, m = 4", _memory("gated", 4), "17.1"),
            **{
                f"{rule}-unscaled": _converted(
                    f"{rule}, without --scale-read-out", _memory(rule).removesuffix(" --scale-read-out")
                )
                for rule in ("decay", "gated")
            },
            "gated-scratch": _converted("gated, from scratch", _memory("gated"), start="", source=None),
            "linear": _converted("linear, m = 32", _LINEAR),
            "linear-transfer": _converted(
                "linear, attention transfer alone",
                _LINEAR,
                start=f"--transfer-from SOURCE {_TRANSFER}",
                updates=160,
                schedule="--lr 0.01",
                becomes_source=True,
            ),
            "linear-aligned": _converted(
                "linear, after the transfer",
                _LINEAR,
                start="--finetune-from-model SOURCE",
                source="linear-transfer",
                updates=640,
                schedule="--lr 0.0001",
            ),
        },
        claims=read_claims(
            "test, context-128",
            """
            decay is ahead of gated after 800 updates: gated-800 - decay-800 >= 0
            gated is ahead of add after 800 updates: add-800 - gated-800 >= 0
            decay is ahead of gated after 2,400 updates: gated-2400 - decay-2400 >= 0
            gated is ahead of add after 2,400 updates: add-2400 - gated-2400 >= 0
            decay and gated are equal at m = 4, within 1: gated-m4 - decay-m4 in -1..1
            add is level with delta, within 1: delta-800 - add-800 in -1..1
            decay, m = 16, is ahead of decay, m = 4: decay-m4 - decay-800 >= 0
            gated is ahead of gated from scratch: gated-scratch - gated-800 >= 0
            decay is ahead of decay without --scale-read-out: decay-unscaled - decay-800 >= 0
            gated is ahead of gated without --scale-read-out: gated-unscaled - gated-800 >= 0
            linear is better after attention was transferred: linear - linear-aligned >= 0
            """,
        ),
    ),
    "smollm2": Table(
        title="SmolLM2-135M-Instruct converted: perplexity on WikiText-2",
        folder="smollm2",
        measures=(),
        rows=_smollm2_rows(),
        page="convert.md",
        baseline=("source", _SMOLLM2_TEST),
    ),
}
"""As they are called on the command line. The numbers are the paper's, of its own models and data."""
