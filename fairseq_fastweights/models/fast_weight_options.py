"""The options that all models with fast weights share."""

# No `from __future__ import annotations` and no `X | None` here: fairseq reads the types of a configuration's fields as
# they stand, and knows `Optional` alone.
# ruff: noqa: UP045

from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass, field, fields, make_dataclass
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
from fairseq_fastweights.mixers.registry import MIXERS, Kind, option_name
from fairseq_fastweights.mixers.update_rules import write_normalization
from fairseq_fastweights.models.description import MEMORIES

WHAT_MEMORIES_DO = "; ".join(f"{name} {MIXERS[name].help}" for name in MEMORIES)


def in_papers(setting: Callable[[Kind], Any]) -> str:
    """Names the mixers with feature maps by a setting of their papers: each value with their names."""
    of_names = {name: setting(kind) for name, kind in MIXERS.items() if kind.feature_map is not None}
    values = dict.fromkeys(of_names.values())
    return "; ".join(f"{value} for {', '.join(n for n, its in of_names.items() if its == value)}" for value in values)


def option(default: Any, text: str) -> Any:
    """A field of a dataclass of options: its default, and its help, which says the default where the text does not."""
    if "(default: " not in text:
        words = "off" if default is False else default if default != "" else "none"
        text = f"{text} (default: {words})"
    return field(default=default, metadata={"help": text})


MixerOptions = make_dataclass(
    "MixerOptions",
    [
        (option_name(mixer, name), own.type, option(own.default, own.help))
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
    )
    dpfp_nu: int = option(1, "nu of the feature map dpfp (Schlag et al. 2021, Eq. 37)")
    favor_features: Optional[int] = option(
        None,
        "number of random features m of the maps favor and favor-schlag, whose output has 2 m dimensions "
        "(default: half of --feature-dim, or head dimension x log head dimension)",
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
