"""The options that all models with fast weights share."""

# No `from __future__ import annotations` and no `X | None` here: fairseq reads the types of a configuration's fields as
# they stand, and knows `Optional` alone.
# ruff: noqa: UP045

from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass, field, fields, make_dataclass
from operator import not_
from types import MappingProxyType
from typing import Any, Optional

from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.dataclass.initialize import add_defaults
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_NAME_REGISTRY, MODEL_DATACLASS_REGISTRY
from fairseq.utils import safe_getattr
from omegaconf import OmegaConf

from fairseq_fastweights import ops
from fairseq_fastweights.invalid_input import InvalidInput
from fairseq_fastweights.mixers.feature_maps import FEATURE_MAPS
from fairseq_fastweights.mixers.mixer import Mixer
from fairseq_fastweights.mixers.registry import (
    MIXERS,
    SHARED_DEFAULTS,
    Kind,
    build_mixer,
    lookup,
    option_name,
    parse_pattern,
)
from fairseq_fastweights.mixers.update_rules import parse_normalization, write_normalization

MEMORIES = [name for name, kind in MIXERS.items() if "scale_read_out" in kind.shared]
"""The choices of --update-rule: the mixers that are a fast weight memory and nothing more."""

WHAT_MEMORIES_DO = "; ".join(f"{name} {MIXERS[name].help}" for name in MEMORIES)


def in_papers(setting: Callable[[Kind], Any]) -> str:
    """Names the mixers with feature maps by a setting of their papers: each value with their names."""
    of_names = {name: setting(kind) for name, kind in MIXERS.items() if kind.feature_map is not None}
    values = dict.fromkeys(of_names.values())
    return "; ".join(f"{value} for {', '.join(n for n, its in of_names.items() if its == value)}" for value in values)


MixerOptions = make_dataclass(
    "MixerOptions",
    [
        (option_name(mixer, name), option.type, field(default=option.default, metadata={"help": option.help}))
        for mixer, kind in MIXERS.items()
        for name, option in kind.options.items()
    ],
    bases=(FairseqDataclass,),
)
"""The options of single kinds of mixers."""


def defaults_in_help(options: type[FairseqDataclass]) -> type[FairseqDataclass]:
    """Adds its default to the help of each option that does not mention it."""
    for option in fields(options):
        text = option.metadata.get("help")
        if text and "(default: " not in text:
            words = "off" if option.default is False else option.default if option.default != "" else "none"
            option.metadata = MappingProxyType({**option.metadata, "help": f"{text} (default: {words})"})
    return options


def add_group(parser: ArgumentParser, title: str, options: FairseqDataclass) -> None:
    """Adds options to a parser as a group; as fairseq's options of models, they have no value unless they are given."""
    group = parser.add_argument_group(title, argument_default=SUPPRESS)
    gen_parser_from_dataclass(group, options, delete_default=True)


@defaults_in_help
@dataclass
class FastWeightOptions(MixerOptions):  # type: ignore[misc, valid-type]
    """Options of mixers, which language and translation models share."""

    mixers: str = field(
        default="",
        metadata={
            "help": "mixers of the decoder's layers: comma-separated names, each with the numbers of its layers, as in "
            "'delta:1-10,softmax:11-12'; one name may stand for all other layers, as in 'delta,softmax:6,12'. The "
            f"names are {', '.join(MIXERS)} (default: --update-rule in all layers)"
        },
    )
    update_rule: ChoiceEnum(MEMORIES) = field(  # type: ignore[valid-type]
        default="delta",
        metadata={"help": f"update rule of the memories, short for --mixers with its name: {WHAT_MEMORIES_DO}"},
    )
    feature_map: ChoiceEnum(["auto", *FEATURE_MAPS]) = field(  # type: ignore[valid-type]
        default="auto",
        metadata={
            "help": "feature map of queries and keys; favor-schlag is FAVOR+ as in the program of Schlag et al. 2021, "
            "without the scale head dimension^(-1/4) and with 1e-4 added to every exponential; auto is what the rule's "
            f"paper uses: {in_papers(lambda kind: kind.feature_map)}"
        },
    )
    feature_dim: Optional[int] = field(
        default=None,
        metadata={
            "help": "dimension of queries and keys after the feature map; the memory of a head has this times the head "
            "dimension numbers (default: the head dimension; 2 x --favor-features for favor; 2 x head dimension x "
            "--dpfp-nu for dpfp)"
        },
    )
    dpfp_nu: int = field(default=1, metadata={"help": "nu of the feature map dpfp (Schlag et al. 2021, Eq. 37)"})
    favor_features: Optional[int] = field(
        default=None,
        metadata={
            "help": "number of random features m of the maps favor and favor-schlag, whose output has 2 m dimensions "
            "(default: half of --feature-dim, or head dimension x log head dimension)"
        },
    )
    normalization: str = field(
        default="auto",
        metadata={
            "help": "normalisation: comma-separated sum (divides queries and keys by their sums), attention (divides "
            "what is read by what a value of 1 would give) and removal (delta rule only: divides what is removed "
            "alike), or none; auto is what the rule's paper uses: "
            f"{in_papers(lambda kind: write_normalization(kind.normalization))}"
        },
    )
    scale_read_out: bool = field(
        default=False,
        metadata={"help": "multiply what is read from the memory by 1 / sqrt(head dimension)"},
    )
    fast_weight_backend: ChoiceEnum(list(ops.BACKENDS)) = field(  # type: ignore[valid-type]
        default="auto",
        metadata={"help": "implementation of the update rules; auto takes compiled kernels where there are some"},
    )
    compile: bool = field(
        default=False,
        metadata={
            "help": "in training, let torch.compile make one graph of all layers of a kind; the first updates take as "
            "long as it compiles. Layers without a mixer, as those of fairseq's own attention, stay as they are. Where "
            "they can be recorded, a GPU replays a language model's layers as CUDA graphs too; if not, the log says why"
        },
    )
    no_cuda_graphs: bool = field(
        default=False, metadata={"help": "let --compile do without CUDA graphs, which keep memory for themselves"}
    )


def same(value: Any) -> Any:
    """The value itself; of a choice its name."""
    return getattr(value, "value", value)


SHARED_OPTIONS: dict[str, tuple[str, Any, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "bias": ("no_attention_bias", False, not_, not_),
    "backend": ("fast_weight_backend", "auto", str, same),
    "feature_map": (
        "feature_map",
        "auto",
        lambda text: None if text == "auto" else str(text),
        lambda name: "auto" if name is None else name,
    ),
    "normalization": (
        "normalization",
        "auto",
        parse_normalization,
        lambda names: "auto" if names is None else write_normalization(names),
    ),
    **{
        name: (name, default, same, same)
        for name, default in SHARED_DEFAULTS.items()
        if name not in ("bias", "backend", "feature_map", "normalization")
    },
}
"""The settings of several kinds of mixers, by the names that `build_mixer` takes.

Each has its option, the value where a model lacks the option, and how the setting is read from it and written to it.
"""


OPTIONS_OF_MIXERS: dict[str, str] = {
    "attention_dropout": "dropout",
    **dict.fromkeys(("decoder_xformers_att_config", "encoder_xformers_att_config"), "xformers_att_config"),
    "fast_weight_heads": "fast_weight_heads",
    **{option: setting for setting, (option, *_) in SHARED_OPTIONS.items()},
    **{name: name for name in (option.name for option in fields(MixerOptions)) if not name.startswith("_")},
}
"""The options that mixers alone read, and the names of their settings for `build_mixer`.

The number of attention's heads is none: it is part of the decoder's shape, which any mixer may be given.
"""


def shared_settings(args: Any) -> dict[str, Any]:
    """Returns the settings of several kinds of mixers from a model's options."""
    return {name: read(getattr(args, option, default)) for name, (option, default, read, _) in SHARED_OPTIONS.items()}


def mixer_settings(args: Any, heads: int) -> dict[str, Any]:
    """Returns the settings for `build_mixer` from a model's options; `heads` is the number of heads of attention.

    Raises:
        ValueError: for an unknown normalisation.
    """
    named = (option_name(mixer, option) for mixer, kind in MIXERS.items() for option in kind.options)
    return {
        **{name: getattr(args, name) for name in named},
        **shared_settings(args),
        "num_heads": heads,
        "fast_weight_heads": getattr(args, "fast_weight_heads", None) or heads,
        "dropout": args.attention_dropout,
        "zero_centered_norms": getattr(args, "zero_centered_norms", False),
        "max_positions": args.max_target_positions,
    }


def mixer_builder(
    name: str, settings: dict[str, Any], kinds: dict[str, Kind] = MIXERS, side: str = "decoder"
) -> Callable[[int], Mixer]:
    """Returns a function that makes a layer's mixer from its width; errors name the options of the model's `side`."""

    def build(embed_dim: int) -> Mixer:
        try:
            return build_mixer(name, embed_dim, settings, kinds)
        except ValueError as error:
            first, _, why = str(error).partition(" ")
            option = {"num_heads": f"{side}_attention_heads", "head_dim": "head_dim", "backend": "fast_weight_backend"}
            if first not in option:
                raise
            why = why.replace("embed_dim", f"{side}_embed_dim").replace("num_heads", f"{side}_attention_heads")
            raise InvalidInput(f"{option[first]} {why}") from None

    return build


def parse_layers(text: str, layers: int, name: str = "softmax_attention_layers") -> frozenset[int]:
    """Reads layers, as of --softmax-attention-layers: "all", or comma-separated numbers from 1; empty for none.

    Raises:
        ValueError: for anything else, or a number above `layers`.
    """
    if text.strip() == "all":
        return frozenset(range(1, layers + 1))
    numbers = [word.strip() for word in text.split(",") if word.strip()]
    if not all(n.isdecimal() and 1 <= int(n) <= layers for n in numbers):
        raise InvalidInput(f"{name} is {text!r}; it must be 'all' or comma-separated numbers from 1 to {layers}")
    return frozenset(int(n) for n in numbers)


def parse_mixers(args: Any, softmax_layers: str, default_rule: str) -> tuple[str, ...]:
    """Reads the mixers of a decoder's layers: --mixers, or the pattern that the short forms stand for.

    Args:
        args: options of a model.
        softmax_layers: those that keep softmax attention, as `parse_layers` reads them.
        default_rule: the default of --update-rule.

    Raises:
        ValueError: for a pattern that cannot be read, or that contradicts other options.
    """
    rule, layers = str(args.update_rule), args.decoder_layers
    softmax = parse_layers(softmax_layers, layers)
    if not args.mixers:
        lookup("update_rule", rule, {name: MIXERS[name] for name in MEMORIES})
        return parse_pattern(f"{rule},softmax:{','.join(map(str, softmax))}" if softmax else rule, layers)
    names = parse_pattern(args.mixers, layers)
    if softmax:
        raise InvalidInput(
            f"mixers is {args.mixers!r}, and softmax_attention_layers is set too; it must be left out: mixers says "
            "which layers have softmax"
        )
    if rule != default_rule and rule not in names:
        raise InvalidInput(
            f"update_rule is {rule!r}, which mixers, {args.mixers!r}, has in no layer; one of them must go"
        )
    return names


def set_defaults(args: Any, options: type[FairseqDataclass], inherited: type[FairseqDataclass]) -> None:
    """Sets options that were not given to their defaults: those of `options` that `inherited` lacks."""
    known = {f.name for f in fields(inherited)}
    for own in fields(options):
        if own.name not in known:
            setattr(args, own.name, safe_getattr(args, own.name, own.default))


def check_architecture(args: Any) -> None:
    """Checks that the settings of a named architecture are in a model's configuration for training.

    The released fairseq-hydra-train overwrites them by the defaults of the model, and would train another model. The
    switches show it: no command line can turn off a switch that an architecture turns on. With the patched
    fairseq-hydra-train, which applies architectures, a configuration file may turn a switch off.

    Raises:
        ValueError: if the settings were overwritten.
    """
    name = getattr(args, "_name", None)
    model = ARCH_MODEL_NAME_REGISTRY.get(name)
    if model == name or model not in MODEL_DATACLASS_REGISTRY:
        return
    architecture = Namespace()
    ARCH_CONFIG_REGISTRY[name](architecture)
    made = OmegaConf.create({"model": {"_name": name}})
    add_defaults(made)
    switches = [option for option, value in vars(architecture).items() if value is True]
    lost = [option for option in switches if not getattr(args, option, True) and not made.model[option]]
    if lost:
        raise InvalidInput(
            f"model._name is {name!r}, whose settings this fairseq's fairseq-hydra-train leaves out ({lost[0]} is "
            f"False); it must be {model!r}, with all settings written out, or --arch of fairseq-train, unless fairseq "
            "is the one that tools/build_fairseq.py --force installs"
        )
