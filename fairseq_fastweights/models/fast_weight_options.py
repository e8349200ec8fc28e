"""The options that this package adds to those of fairseq's models, each with its help and its smallest number."""

# No `from __future__ import annotations` and no `X | None` here: fairseq reads the types of a configuration's fields as
# they stand, and knows `Optional` alone.
# ruff: noqa: UP045

from argparse import SUPPRESS, ArgumentParser
from collections.abc import Callable
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any, Optional

from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.utils import safe_getattr

from fairseq_fastweights import ops
from fairseq_fastweights.adaptive_softmax import SQUARE_PROJECTIONS
from fairseq_fastweights.mixers.feature_maps import FEATURE_MAPS
from fairseq_fastweights.mixers.projections import PROJECTION_BIASES
from fairseq_fastweights.mixers.registry import MIXERS, Kind, option_name
from fairseq_fastweights.mixers.update_rules import write_normalization
from fairseq_fastweights.models.description import MEMORIES

WHAT_MEMORIES_DO = "; ".join(f"{name} {MIXERS[name].help}" for name in MEMORIES)


def in_papers(setting: Callable[[Kind], Any]) -> str:
    """Names the mixers with feature maps by a setting of their papers: each value with their names."""
    of_names = {name: setting(kind) for name, kind in MIXERS.items() if kind.feature_map is not None}
    values = dict.fromkeys(of_names.values())
    return "; ".join(f"{value} for {', '.join(n for n, its in of_names.items() if its == value)}" for value in values)


def option(default: Any, text: str, least: float | None = None) -> Any:
    """A field of a dataclass of options.

    Args:
        default: the option's default.
        text: its help, to which the default is added unless the text has it.
        least: the smallest number that is allowed; None for no limit.
    """
    if "(default: " not in text:
        words = "off" if default is False else default if default != "" else "none"
        text = f"{text} (default: {words})"
    return field(default=default, metadata={"help": text, "least": least})


MixerOptions = make_dataclass(
    "MixerOptions",
    [
        (option_name(mixer, name), own.type, option(own.default, own.help, own.least))
        for mixer, kind in MIXERS.items()
        for name, own in kind.options.items()
    ],
    bases=(FairseqDataclass,),
)
"""The options of single kinds of mixers."""


def add_group(parser: ArgumentParser, title: str, options: FairseqDataclass) -> None:
    """Adds options to a parser as a group; as fairseq's options of models, they have no value unless they are given."""
    group = parser.add_argument_group(title, argument_default=SUPPRESS)
    gen_parser_from_dataclass(group, options, delete_default=True)


@dataclass
class FastWeightOptions(MixerOptions):  # type: ignore[misc, valid-type]
    """Options of mixers, which language and translation models share."""

    mixers: str = option(
        "",
        "mixers of the decoder's layers: comma-separated names, each with the numbers of its layers, as in "
        "'delta:1-10,softmax:11-12'; one name may stand for all other layers, as in 'delta,softmax:6,12'. The "
        f"names are {', '.join(MIXERS)} (default: --update-rule in all layers)",
    )
    update_rule: ChoiceEnum(MEMORIES) = option(  # type: ignore[valid-type]
        "delta", f"update rule of linear attention, short for --mixers with its name: {WHAT_MEMORIES_DO}"
    )
    feature_map: ChoiceEnum(["auto", *FEATURE_MAPS]) = option(  # type: ignore[valid-type]
        "auto",
        "feature map of queries and keys; favor-schlag is FAVOR+ as in the program of Schlag et al. 2021, "
        "without the scale head dimension^(-1/4) and with 1e-4 added to every exponential; auto is the rule's "
        f"paper's: {in_papers(lambda kind: kind.feature_map)}",
    )
    feature_dim: Optional[int] = option(
        None,
        "dimension of queries and keys after the feature map; the state of a head has this times the head "
        "dimension numbers (default: the head dimension; 2 x --favor-features for favor; 2 x head dimension x "
        "--dpfp-nu for dpfp)",
        least=1,
    )
    dpfp_nu: int = option(1, "nu of the feature map dpfp (Schlag et al. 2021, Eq. 37)", least=1)
    favor_features: Optional[int] = option(
        None,
        "number of random features m of the maps favor and favor-schlag, whose output has 2 m dimensions "
        "(default: half of --feature-dim, or head dimension x log head dimension)",
        least=1,
    )
    normalization: str = option(
        "auto",
        "normalisation: comma-separated sum (divides queries and keys by their sums), attention (divides "
        "the output by the output for values of 1) and removal (delta rule only: divides the removed part "
        "alike), or none; auto is that of the rule's paper: "
        f"{in_papers(lambda kind: write_normalization(kind.normalization))}",
    )
    scale_read_out: bool = option(False, "multiply the output of linear attention by 1 / sqrt(head dimension)")
    fast_weight_backend: ChoiceEnum(list(ops.BACKENDS)) = option(  # type: ignore[valid-type]
        "auto", "implementation of the update rules; auto takes compiled kernels where there are some"
    )
    compile: bool = option(
        False,
        "in training, let torch.compile make one graph of all layers of a kind; the first updates take as "
        "long as it compiles. Layers without a mixer, as those of fairseq's own attention, stay as they are. Where "
        "they can be recorded, a GPU replays a language model's layers as CUDA graphs too; if not, the log says why",
    )
    no_cuda_graphs: bool = option(False, "let --compile do without CUDA graphs, which keep memory for themselves")


@dataclass
class FastWeightLanguageModelOptions(FastWeightOptions):
    """The options that `fast_weight_lm` adds to those of fairseq's `transformer_lm`."""

    softmax_attention_layers: str = option(
        "",
        "layers that keep softmax attention, short for --mixers with softmax in them: comma-separated "
        "numbers from 1, or all, which makes fairseq's Transformer",
    )
    fast_weight_heads: Optional[int] = option(
        None, "number of heads in layers of linear attention (default: --decoder-attention-heads)"
    )
    no_attention_bias: bool = option(
        False, "leave out the biases of the projections in all mixers but softmax; gates that decay a state keep theirs"
    )
    init_std: Optional[float] = option(
        None,
        "standard deviation of the normal distribution that all projections and embeddings are drawn from "
        "(default: fairseq's initial distributions)",
    )
    square_projections: ChoiceEnum(list(SQUARE_PROJECTIONS)) = option(  # type: ignore[valid-type]
        "keep",
        "projections of the adaptive input and softmax that change no size: keep (fairseq's), identity (they start as "
        "the identity) or none (left out, with the dropout after them, as in Transformer-XL's program)",
    )
    adaptive_softmax_bias: bool = option(False, "give the adaptive softmax a bias for each token and each cluster")
    rotary_dim: int = option(
        0,
        "number of dimensions of each query and key that softmax attention and window-sum rotate by their "
        "positions (rotary position embedding); 0 is none. Linear attention does not need it, and retention always "
        "rotates all dimensions",
    )
    rotary_base: float = option(10000.0, "base of the wavelengths of the rotary position embedding")
    rotary_scaling: str = option(
        "",
        "scaling of the rotary position embedding for texts longer than in training: linear:FACTOR, or "
        "llama3:FACTOR,LOW,HIGH,POSITIONS as in Llama 3",
    )
    kv_heads: int = option(
        0,
        "number of heads of keys and values in softmax and linear attention (grouped-query attention); 0 "
        "is as many as of queries",
        least=0,
    )
    head_dim: int = option(
        0, "dimension of each head in softmax and linear attention; 0 is the width divided by the heads", least=0
    )
    projection_bias: ChoiceEnum(list(PROJECTION_BIASES)) = option(  # type: ignore[valid-type]
        "all",
        "which projections of softmax and linear attention have biases: all, qkv (all but that of the "
        "output, as in Qwen2) or none (Llama); gates keep theirs",
    )
    query_key_norm_eps: Optional[float] = option(
        None,
        "normalise the queries and keys of each head by an RMS norm with this epsilon, as in Qwen3 (default: no norm)",
        least=0,
    )
    rms_norm_eps: Optional[float] = option(
        None, "use RMS norms with this epsilon, as Llama with 1e-5 (default: fairseq's layer norms)", least=0
    )
    zero_centered_norms: bool = option(
        False, "let RMS norms multiply by 1 + w, whose w starts at 0, as in Qwen3-Next and Qwen3.5"
    )
    output_norm_layers: str = option(
        "",
        "layers, comma-separated numbers from 1 or all, that have their norms behind their parts, "
        "x + norm(mixer(x)), as OLMo 2, and not before them",
    )
    swiglu: bool = option(
        False,
        "use SwiGLU feed-forward networks, W2 (silu(Wg x) * W1 x) without biases (Shazeer 2020), as Llama; "
        "--activation-fn is ignored then",
    )
    parallel_residual: bool = option(
        False,
        "let attention and feed-forward network read the same input, each through a layer norm of its own, "
        "as in GPT-NeoX",
    )
    cuda_graphs: bool = option(
        False,
        "in training on a GPU, record the layers as CUDA graphs, and replay these for all batches "
        "of the same shape; other batches are computed as without. Not for all options: the error names those "
        "that cannot be recorded. --compile does it by itself where it can",
    )
    mask_special_symbols: bool = option(
        False,
        "give <s>, <pad> and <unk> probability 0, for vocabularies that came without them; text that "
        "contains <unk> then has infinite perplexity",
    )


def set_defaults(args: Any, options: type[FairseqDataclass], inherited: type[FairseqDataclass]) -> None:
    """Sets options that were not given to their defaults: those of `options` that `inherited` lacks."""
    known = {f.name for f in fields(inherited)}
    for own in fields(options):
        if own.name not in known:
            setattr(args, own.name, safe_getattr(args, own.name, own.default))
