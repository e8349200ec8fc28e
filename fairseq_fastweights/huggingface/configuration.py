"""The configuration of a language model with mixers, which `transformers` stores in config.json."""

from __future__ import annotations

from typing import Any, ClassVar, TypeAlias

import torch
from transformers import GenerationConfig, PreTrainedConfig

from fairseq_fastweights.adaptive_softmax import SQUARE_PROJECTIONS
from fairseq_fastweights.invalid_input import InvalidInput, check_number
from fairseq_fastweights.layers import ACTIVATIONS
from fairseq_fastweights.mixers.mixer import check_divisor
from fairseq_fastweights.mixers.registry import (
    MIXERS,
    SHARED_DEFAULTS,
    check_read,
    have_sizes,
    lookup,
    option_name,
    parse_pattern,
)
from fairseq_fastweights.mixers.update_rules import NORMALIZATIONS

FORMAT = 1
"""The format of config.json. A larger number belongs to a later version of this package, and is refused."""

POSITIONS = ("sinusoidal", "learned", "none")
_NAMES = {"position_embeddings": POSITIONS, "hidden_act": tuple(ACTIVATIONS), "square_projections": SQUARE_PROJECTIONS}

# Settings of mixers that have a field of their own, and are not in `mixer_settings`.
_SAID_ELSEWHERE = {
    "num_heads": "num_attention_heads",
    "dropout": "attention_dropout",
    "max_positions": "max_position_embeddings",
    "zero_centered_norms": "zero_centered_norms",
}

# Entries of transformers itself in a config.json, beside the fields.
_OF_TRANSFORMERS = {
    "model_type",
    "torch_dtype",
    "num_labels",
    "name_or_path",
    "_name_or_path",
    "_commit_hash",
    "output_attentions",
    "_attn_implementation_internal",
    "_experts_implementation_internal",
    "auto_map",
}
# Some of these may name code on the hub. Mixers have no implementations to choose from, nor settings of single layers.
_CHOICES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("attn_implementation", "_attn_implementation"), (None, "eager", "sdpa")),
    **dict.fromkeys(("experts_implementation", "_experts_implementation"), (None, "eager", "grouped_mm")),
    "per_layer_config": (None, {}),
}
_QUANTIZATIONS = ("bitsandbytes", "torchao", "quanto", "hqq")
"""Methods of quantization by packages that a user has installed; others load code from the hub."""

_MOST = {"num_hidden_layers": 10**4, "max_position_embeddings": 10**12}
_MOST_OF_OTHERS = 10**9
_SHARED_TYPES: dict[str, type] = {
    **dict.fromkeys(("scale_read_out", "bias"), bool),
    **dict.fromkeys(("rotary_base", "query_key_norm_eps"), float),
    **dict.fromkeys(("feature_map", "rotary_scaling", "projection_bias", "backend"), str),
}
"""Of the settings of several kinds of mixers; the others are whole numbers."""
Probability: TypeAlias = float
NonNegative: TypeAlias = float
Positive: TypeAlias = float
TokenId: TypeAlias = int
_LIMITS: dict[str, dict[str, Any]] = {
    "Probability": {"least": 0, "most": 1},
    "NonNegative": {"least": 0},
    "Positive": {"above": 0},
}
"""The limits of numbers, by the declared types of settings."""
_TYPE_NAMES = {int: "a whole number", bool: "true or false", str: "a name"}


class FastWeightConfig(PreTrainedConfig):
    """The settings of a `FastWeightModel`, all of which are keyword arguments and entries of config.json.

    Attributes:
        format_version: of config.json.
        vocab_size: number of vocabulary entries.
        hidden_size: width of the layers.
        input_size: width of the embeddings; None for `hidden_size`.
        output_size: width of the output layer's input; None for `hidden_size`.
        intermediate_size: inner width of the feed-forward networks.
        num_hidden_layers: number of layers.
        num_attention_heads: number of heads of each layer.
        mixers: a name of `mixers.registry.MIXERS` for each layer, or a pattern such as "delta:1-10,softmax:11-12"; None
            for "delta" in all.
        mixer_settings: the mixers' other settings, by the names that `mixers.registry.build_mixer` takes:
            "fast_weight_heads", "feature_map", "local_window" ... Missing ones have the mixer's defaults.
        max_position_embeddings: the largest length of texts, for learned positions and for bounded mixers.
        position_embeddings: one of `POSITIONS`, which are added to the embeddings.
        hidden_act: one of `ACTIVATIONS`.
        pre_norm: whether norms come before mixers and feed-forward networks, not after the residual sums.
        final_norm: whether there is a norm after the last layer.
        parallel_residual: whether a layer's mixer and feed-forward network read the same input (GPT-NeoX).
        rms_norm_eps: added under the root of RMS norms (Llama); None for layer norms.
        zero_centered_norms: whether RMS norms multiply by 1 + w instead of w (Qwen3-Next).
        output_norm_layers: numbers, from 1, of the layers whose norms come behind mixers and feed-forward networks,
            x + norm(mixer(x)), as in OLMo 2; None for none.
        swiglu: whether feed-forward networks are W2 (silu(Wg x) * W1 x) without biases; `hidden_act` is then unused.
        embedding_norm: whether the embeddings are normalised.
        scale_embeddings: whether they are multiplied by sqrt(hidden_size).
        adaptive_input_cutoffs: the first token id of each cluster after the first, which has smaller embeddings
            (Baevski & Auli 2019); None for embeddings of one size.
        adaptive_input_factor: ratio of the sizes of successive clusters.
        adaptive_softmax_cutoffs: the same for the output layer, which then returns log-probabilities as logits; None
            for one matrix.
        adaptive_softmax_factor: ratio of the sizes of successive clusters of the output layer.
        adaptive_softmax_dropout: probability of dropout in them.
        adaptive_softmax_bias: whether the adaptive softmax has a bias for each token and each cluster.
        square_projections: of clusters, those that change no size: "keep", "identity" (new ones start as the identity)
            or "none" (left out).
        tie_word_embeddings: whether output layer and embeddings share their weights, cluster by cluster if there are
            several.
        tie_adaptive_projections: whether clusters share their projections too.
        masked_tokens: ids of the tokens that the model never predicts.
        dropout: probability of dropout of mixers' and feed-forward networks' outputs in training.
        attention_dropout: probability of dropout within mixers in training.
        activation_dropout: probability of dropout within feed-forward networks in training.
        layerdrop: probability of leaving out a layer in training.
        initializer_range: standard deviation of new projections and embeddings; None for fairseq's distributions.
        use_cache: whether a call returns the mixers' states.
        pad_token_id: id of the padding token.
        bos_token_id: id of the token that begins a text; in fairseq the end of another text.
        eos_token_id: id of the token that ends a text.

    Raises:
        ValueError: if a setting is unknown or not allowed; the message names it, its value and the allowed ones.

    Examples:
        >>> config = FastWeightConfig(vocab_size=40, hidden_size=16, num_attention_heads=2, mixers="gated,softmax:6")
        >>> config.mixers
        ['gated', 'gated', 'gated', 'gated', 'gated', 'softmax']
    """

    model_type = "fast_weight"
    auto_map: ClassVar[dict[str, str]] = {}  # for programs that look whether a model has code of its own
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]  # to which the Trainer adds

    format_version: int = FORMAT
    vocab_size: int = 50260
    hidden_size: int = 512
    input_size: int | None = None
    output_size: int | None = None
    intermediate_size: int = 2048
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    mixers: list[str] | str | None = None
    mixer_settings: dict[str, Any] | None = None
    max_position_embeddings: int = 1024
    position_embeddings: str = "sinusoidal"
    hidden_act: str = "relu"
    pre_norm: bool = True
    final_norm: bool = True
    parallel_residual: bool = False
    rms_norm_eps: NonNegative | None = None
    zero_centered_norms: bool = False
    output_norm_layers: list[int] | None = None
    swiglu: bool = False
    embedding_norm: bool = False
    scale_embeddings: bool = True
    adaptive_input_cutoffs: list[int] | None = None
    adaptive_input_factor: Positive = 4.0
    adaptive_softmax_cutoffs: list[int] | None = None
    adaptive_softmax_factor: Positive = 4.0
    adaptive_softmax_dropout: Probability = 0.0
    adaptive_softmax_bias: bool = False
    square_projections: str = "keep"
    tie_word_embeddings: bool = True
    tie_adaptive_projections: bool = False
    masked_tokens: list[int] | None = None
    dropout: Probability = 0.1
    attention_dropout: Probability = 0.0
    activation_dropout: Probability = 0.0
    layerdrop: Probability = 0.0
    initializer_range: NonNegative | None = None
    use_cache: bool = True
    pad_token_id: TokenId | None = 1
    bos_token_id: TokenId | None = 2
    eos_token_id: TokenId | list[int] | None = 2

    def __post_init__(self, **kwargs: Any) -> None:
        if not _is_count(self.format_version) or self.format_version != FORMAT:
            raise InvalidInput(
                f"format_version is {self.format_version!r}; this version of fairseq_fastweights reads {FORMAT}"
            )
        # Folders of older versions of transformers have settings of generation in config.json.
        generation = GenerationConfig().to_dict()
        known = {*_OF_TRANSFORMERS, *_CHOICES, *generation, "quantization_config"}
        if unknown := [name for name in kwargs if name not in known]:
            raise InvalidInput(f"{unknown[0]} is {kwargs[unknown[0]]!r:.200}; there is no setting of this name")
        for name, allowed in _CHOICES.items():
            if kwargs.get(name) not in allowed:
                raise InvalidInput(
                    f"{name} is {kwargs[name]!r:.200}; these models have nothing to choose there: it must be one of "
                    f"{', '.join(map(str, allowed))}, which are the same"
                )
        _check_quantization(kwargs.get("quantization_config"))
        self.dtype = _check_dtype("torch_dtype", kwargs.pop("torch_dtype", None)) if self.dtype is None else self.dtype
        _check_dtype("dtype", self.dtype)
        self._check_types()
        self.input_size = self.hidden_size if self.input_size is None else self.input_size
        self.output_size = self.hidden_size if self.output_size is None else self.output_size
        self.mixers = self._read_mixers()
        self.mixer_settings = self._read_mixer_settings(self.mixers)
        self.output_norm_layers = [] if self.output_norm_layers is None else self.output_norm_layers
        self._check_layers()
        self.masked_tokens = [] if self.masked_tokens is None else self.masked_tokens
        self._check_vocabulary()
        super().__post_init__(**kwargs)

    def mixer_arguments(self) -> dict[str, Any]:
        """The settings for `mixers.registry.build_mixer`."""
        assert self.mixer_settings is not None
        settings = dict(self.mixer_settings)
        if settings.get("normalization") is not None:
            settings["normalization"] = frozenset(settings["normalization"])
        if settings.get("fast_weight_heads") is None:
            settings["fast_weight_heads"] = self.num_attention_heads
        return settings | {name: getattr(self, own) for name, own in _SAID_ELSEWHERE.items()}

    def _check_types(self) -> None:
        """Checks each number, flag and name by itself, by the type of its field."""
        for name, declared in FastWeightConfig.__annotations__.items():
            value, kind = getattr(self, name), declared.removesuffix(" | None")
            if value is None and kind != declared:
                continue
            if kind == "bool" and (not isinstance(value, int) or value not in (True, False)):
                raise InvalidInput(f"{name} is {value!r}; it must be true or false")
            if kind in _LIMITS:
                check_number(name, value, **_LIMITS[kind])
            elif kind == "int":
                _check_count(name, value)
            elif name in _NAMES and value not in _NAMES[name]:
                raise InvalidInput(f"{name} is {value!r}; it must be one of {', '.join(_NAMES[name])}")

    def _read_mixers(self) -> list[str]:
        layers, mixers = self.num_hidden_layers, self.mixers
        if mixers is None:
            return ["delta"] * layers
        if isinstance(mixers, str):
            return list(parse_pattern(mixers, layers))
        if not isinstance(mixers, (list, tuple)) or len(mixers) != layers:
            raise InvalidInput(
                f"mixers is {mixers!r}; it must hold a name for each of {layers} layers, or be a pattern"
            )
        for name in mixers:
            lookup("mixers", name if isinstance(name, str) else repr(name)[:200], MIXERS)
        return list(mixers)

    def _read_mixer_settings(self, mixers: list[str]) -> dict[str, Any]:
        settings = {} if self.mixer_settings is None else self.mixer_settings
        if not isinstance(settings, dict):
            raise InvalidInput(f"mixer_settings is {settings!r}; it must give settings their values")
        own = {option_name(mixer, x): row for mixer, kind in MIXERS.items() for x, row in kind.options.items()}
        shared = {name for kind in MIXERS.values() for name in (*kind.shared, kind.heads) if name is not None}
        known = {name: _SHARED_TYPES.get(name, int) for name in shared} | {name: row.type for name, row in own.items()}
        for name, value in settings.items():
            if name in _SAID_ELSEWHERE:
                raise InvalidInput(f"mixer_settings holds {name}; it must be given as {_SAID_ELSEWHERE[name]} instead")
            if name not in known:
                allowed = ", ".join(sorted(known.keys() - _SAID_ELSEWHERE))
                raise InvalidInput(f"mixer_settings holds {name!r}; it may hold {allowed}")
            if value is None and name not in own:
                continue
            if name == "normalization":
                words = list(value) if isinstance(value, (list, tuple, set, frozenset)) else [value]
                if not all(word in NORMALIZATIONS for word in words):
                    raise InvalidInput(
                        f"normalization is {value!r}; it must be a list of {', '.join(NORMALIZATIONS)}, or None"
                    )
                settings = settings | {name: sorted(words)}
            else:
                _check_type(name, value, known[name])
        defaults = SHARED_DEFAULTS | {name: row.default for name, row in own.items()}
        # A setting that no mixer of the model reads is refused, unless it has its default.
        given = {name: (name, x) for name, x in settings.items() if x is not None and x != defaults.get(name)}
        check_read(given, settings, [(name, MIXERS) for name in mixers])
        heads = settings.get("fast_weight_heads")
        if heads is not None:
            _check_count("fast_weight_heads", heads)
            if not have_sizes(mixers, settings.get):
                check_divisor("fast_weight_heads", heads, "hidden_size", self.hidden_size)
        return dict(settings)

    def _check_layers(self) -> None:
        layers, most = self.output_norm_layers, self.num_hidden_layers
        if not (self.mixer_settings or {}).get("head_dim"):
            check_divisor("num_attention_heads", self.num_attention_heads, "hidden_size", self.hidden_size)
        if self.parallel_residual and not self.pre_norm:
            raise InvalidInput("parallel_residual is set; it needs pre_norm, which is not")
        if not isinstance(layers, (list, tuple)) or not all(_is_count(number) and number <= most for number in layers):
            raise InvalidInput(f"output_norm_layers is {layers!r}; it must be a list of numbers from 1 to {most}")
        if layers and (self.parallel_residual or not self.pre_norm):
            raise InvalidInput(f"output_norm_layers is {layers!r}; it needs pre_norm, without parallel_residual")

    def _check_vocabulary(self) -> None:
        size, masked, tied = self.vocab_size, self.masked_tokens, self.tie_word_embeddings
        of_input, of_output = self.adaptive_input_cutoffs, self.adaptive_softmax_cutoffs
        for name, cutoffs in (("adaptive_input_cutoffs", of_input), ("adaptive_softmax_cutoffs", of_output)):
            whole = isinstance(cutoffs, (list, tuple)) and len(cutoffs) > 0 and all(map(_is_count, cutoffs))
            if cutoffs is not None and not (whole and list(cutoffs) == sorted(set(cutoffs)) and cutoffs[-1] <= size):
                raise InvalidInput(
                    f"{name} is {cutoffs!r}; its numbers must rise, from 1 at least to vocab_size, {size}, at most"
                )
        if self.square_projections != "keep" and of_input is None and of_output is None:
            raise InvalidInput(f"square_projections is {self.square_projections!r}; it needs cut-offs")
        if self.adaptive_softmax_bias and of_output is None:
            raise InvalidInput("adaptive_softmax_bias is set; it needs adaptive_softmax_cutoffs")
        # Tied cluster by cluster: embeddings and output need clusters of the same tokens and sizes.
        same_clusters = of_input == of_output and self.adaptive_input_factor == self.adaptive_softmax_factor
        if tied and (of_input or of_output) and not (same_clusters and self.input_size == self.output_size):
            raise InvalidInput(
                "tie_word_embeddings is set; it needs the cut-offs, the factor and the size of the input to be those "
                "of the output"
            )
        if tied and self.input_size != self.output_size:
            raise InvalidInput(
                f"tie_word_embeddings is set; it needs input_size, {self.input_size}, to be output_size, "
                f"{self.output_size}"
            )
        if self.tie_adaptive_projections and not (tied and of_output):
            raise InvalidInput("tie_adaptive_projections is set; it needs tie_word_embeddings and cut-offs")
        if not isinstance(masked, (list, tuple)) or not all(isinstance(x, int) and 0 <= x < size for x in masked):
            raise InvalidInput(f"masked_tokens is {masked!r}; it must be a list of numbers below {size}")
        if masked and of_output:
            raise InvalidInput("masked_tokens is set; an adaptive softmax has no logits to mask")
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            value = getattr(self, name)
            for number in value if name == "eos_token_id" and isinstance(value, list) else [value]:
                if number is not None and not (isinstance(number, int) and 0 <= number < size):
                    raise InvalidInput(f"{name} is {number!r}; it must be a number below vocab_size, {size}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _check_dtype(name: str, dtype: Any) -> Any:
    """Checks a type of weights, or its name: torch has other things by name."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is None or (isinstance(found, torch.dtype) and found.is_floating_point):
        return dtype
    raise InvalidInput(f"{name} is {dtype!r:.200}; it must be the name of a floating-point type of torch, as 'float32'")


def _check_quantization(settings: Any) -> None:
    """Checks that the weights in a file are quantized by a method that loads no code."""
    method = settings.get("quant_method") if isinstance(settings, dict) else getattr(settings, "quant_method", settings)
    if method is not None and str(getattr(method, "value", method)) not in _QUANTIZATIONS:
        raise InvalidInput(
            f"quantization_config has the quant_method {method!r:.200}; it must be one of {', '.join(_QUANTIZATIONS)}"
        )


def _check_count(name: str, value: Any) -> None:
    if not _is_count(value):
        raise InvalidInput(f"{name} is {value!r}; it must be a positive whole number")
    _check_most(name, value)


def _check_most(name: str, value: int) -> None:
    """Bounds a size before anything of this size is made: weights are read later."""
    if value > (most := _MOST.get(name, _MOST_OF_OTHERS)):
        raise InvalidInput(f"{name} is {value}; it must be at most {most}")


def _check_type(name: str, value: Any, kind: type) -> None:
    """Checks a mixer's setting."""
    if kind is float:
        check_number(name, value)
    elif not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool):
        raise InvalidInput(f"{name} is {value!r}; it must be {_TYPE_NAMES[kind]}")
    if kind is int:
        _check_most(name, value)
