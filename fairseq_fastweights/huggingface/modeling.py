"""The models, as classes of `transformers`."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from fairseq_fastweights.adaptive_softmax import add_biases, leave_out_square_projections
from fairseq_fastweights.files.safetensors_digests import note_digest
from fairseq_fastweights.huggingface.cache import FastWeightCache, check_cache, check_kind, check_whole
from fairseq_fastweights.huggingface.configuration import FastWeightConfig
from fairseq_fastweights.huggingface.file_sizes import check_folder, check_model
from fairseq_fastweights.huggingface.initialization import draw_weights
from fairseq_fastweights.huggingface.texts import check_takes_starts, read_texts
from fairseq_fastweights.huggingface.vocabulary import (
    AdaptiveInput,
    AdaptiveSoftmax,
    sinusoidal_positions,
    tied_clusters,
)
from fairseq_fastweights.invalid_input import InvalidInput, check_number
from fairseq_fastweights.layers import ACTIVATIONS, MASKED_LOGIT, MixerLayer, form_of_layer, use_rms_norms, use_swiglu
from fairseq_fastweights.mixers.mixer import Mixer, State, in_rows
from fairseq_fastweights.mixers.registry import build_mixer

_OFFSET = 2
"""Rows before those of learned positions, as in fairseq, where positions start after the id of padding."""

_LOSS_OPTIONS = {"num_items_in_batch", "shift_labels", "ignore_index"}
_LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


class FastWeightPreTrainedModel(PreTrainedModel):
    """Base class of the models, for initialisation, loading and saving."""

    config: FastWeightConfig
    config_class = FastWeightConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["FastWeightDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _is_stateful = True

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        # Told that this is custom code, transformers leaves out modules without parameters of their own, as mixers are.
        super()._initialize_weights(module, is_custom_code=False)

    def _init_weights(self, module: nn.Module) -> None:
        identity = self.config.square_projections == "identity"
        draw_weights(module, self.config.initializer_range, self.config.pad_token_id, identity)

    def save_pretrained(self, save_directory: str | os.PathLike[str], *others: Any, **options: Any) -> None:
        """Saves the model as transformers does, with a digest in each file of weights; `push_to_hub=True` sends none.

        Args:
            save_directory: the folder.
            others, options: the other arguments of transformers' method.
        """
        super().save_pretrained(save_directory, *others, **options)
        if options.get("is_main_process", True):
            for path in sorted(Path(save_directory).glob("model*.safetensors")):
                note_digest(path)

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """Resizes the vocabulary as transformers does, without the `masked_tokens` that are then no longer in it.

        Args:
            new_num_tokens: the number of vocabulary entries; None for the present one.
            pad_to_multiple_of: the number is rounded up to a multiple of this; None for no rounding.
            mean_resizing: whether new embeddings are drawn around the mean of the old ones.

        Raises:
            ValueError: if a number is not allowed, a special token would be left without an embedding, or the
                embeddings or the softmax are adaptive.
        """
        size = self.config.vocab_size if new_num_tokens is None else new_num_tokens
        check_number("new_num_tokens", size, 1, whole=True)
        if pad_to_multiple_of is not None:
            check_number("pad_to_multiple_of", pad_to_multiple_of, 1, whole=True)
            size = -(-size // pad_to_multiple_of) * pad_to_multiple_of
        if (new_num_tokens, pad_to_multiple_of) != (None, None):
            for name in ("adaptive_input_cutoffs", "adaptive_softmax_cutoffs"):
                if (cutoffs := getattr(self.config, name)) is not None:
                    raise InvalidInput(f"{name} is {cutoffs}: a vocabulary in clusters cannot be resized")
        generation = getattr(self, "generation_config", None)
        for settings in (self.config, generation):
            for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
                numbers = getattr(settings, name, None)
                most = max([-1, *numbers] if isinstance(numbers, list) else [-1, -1 if numbers is None else numbers])
                if most >= size:
                    raise InvalidInput(f"new_num_tokens is {size}; it must be more than {name}, {most}")
        embeddings: nn.Embedding = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        self.config.masked_tokens = [number for number in self.config.masked_tokens or () if number < size]
        return embeddings

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *others: Any, **options: Any) -> Any:
        """Loads a model as transformers does; an error, before it is made, if a folder's files cannot be its weights.

        Args:
            pretrained_model_name_or_path: a folder, or a model's name on the hub.
            others, options: the other arguments of transformers' method.

        Raises:
            ValueError: if a file is damaged, or the configuration asks for more than its weights hold.
        """
        given = pretrained_model_name_or_path
        if not isinstance(given, (str, os.PathLike, type(None))):
            raise InvalidInput(
                f"pretrained_model_name_or_path is a {type(given).__name__}; it must be a folder, or a name on the hub"
            )
        folder = Path(given or "") / (options.get("subfolder") or "")
        if given and folder.is_dir():
            config = options.get("config")
            check_folder(
                folder, config if isinstance(config, FastWeightConfig) else FastWeightConfig.from_pretrained(folder)
            )
        return super().from_pretrained(given, *others, **options)

    @staticmethod
    def _load_pretrained_model(model: Any, state_dict: Any, checkpoint_files: Any, *others: Any, **named: Any) -> Any:
        """Checks the files and the model's size, and loads the weights as transformers does."""
        loaded = check_model(model, checkpoint_files or (), model.config)
        state_dict = loaded if state_dict is None else state_dict
        return PreTrainedModel._load_pretrained_model(model, state_dict, checkpoint_files, *others, **named)


class FastWeightDecoderLayer(MixerLayer, GradientCheckpointingLayer):
    """A layer of a model of this configuration, in the form that it asks for. Parameters have fairseq's names.

    Args:
        config: the model's.
        index: the layer's number, from 0.
    """

    batch_first = True

    def __init__(self, config: FastWeightConfig, index: int) -> None:
        super().__init__()
        width, between = config.hidden_size, config.intermediate_size
        assert isinstance(config.mixers, list)
        self.index = index
        output_norms = index + 1 in (config.output_norm_layers or ())
        self.form = form_of_layer(config.pre_norm, config.parallel_residual, output_norms)
        self.self_attn = build_mixer(config.mixers[index], width, config.mixer_arguments())
        self.self_attn_layer_norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, between)
        self.fc2 = nn.Linear(between, width)
        self.final_layer_norm = nn.LayerNorm(width)
        self.activation_fn = ACTIVATIONS[config.hidden_act]
        if config.swiglu:
            use_swiglu(self)
        if config.rms_norm_eps is not None:
            use_rms_norms(self, config.rms_norm_eps, config.zero_centered_norms)
        self.dropout_module = nn.Dropout(config.dropout)
        self.activation_dropout_module = nn.Dropout(config.activation_dropout)

    def __call__(self, *arguments: Any, past_key_values: FastWeightCache | None = None, **options: Any) -> Any:
        """Calls `forward`; a layer whose state is kept is not checkpointed, as that would compute it again from it."""
        if past_key_values is None:
            return super().__call__(*arguments, **options)
        check_kind(past_key_values)
        return nn.Module.__call__(self, *arguments, past_key_values=past_key_values, **options)

    def forward(
        self,
        hidden_states: Tensor,
        padding: Tensor | None = None,
        starts: Tensor | None = None,
        past_key_values: FastWeightCache | None = None,
    ) -> Tensor:
        """Mixes positions, and then works on each.

        Args:
            hidden_states: (batch, time, hidden_size).
            padding: (batch, time), true at padding; None for none.
            starts: (batch, time), true where a text begins, for mixers that take it; None for nowhere.
            past_key_values: the cache, in which the mixer's state is read and written.

        Returns:
            (batch, time, hidden_size).
        """
        states: dict[str, State | None] | None = None
        if past_key_values is not None:
            states = {"self_attn": past_key_values.layers[self.index].state}

        def mix(x: Tensor) -> Tensor:
            # Mixers do not overwrite a state that a graph of gradients goes through.
            return self.run_mixer("self_attn", x, padding, states=states, overwrite=True, starts=starts)

        out = self.compute(hidden_states, mix)
        if past_key_values is not None and states is not None:
            past_key_values.layers[self.index].state = states["self_attn"]
        return out


class FastWeightModel(FastWeightPreTrainedModel):
    """Embeddings, layers with mixers and a last layer norm: the model without its output layer.

    Args:
        config: the model's settings.

    Examples:
        >>> config = FastWeightConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
        >>> model = FastWeightModel(config).eval()
        >>> out = model(torch.tensor([[2, 5, 6, 7]]))
        >>> out.last_hidden_state.shape, out.past_key_values.get_seq_length()
        (torch.Size([1, 4, 16]), 4)
    """

    def __init__(self, config: FastWeightConfig) -> None:
        super().__init__(config)
        width, padding = config.hidden_size, config.pad_token_id
        assert config.input_size is not None and config.output_size is not None
        self.embed_tokens: nn.Module
        if config.adaptive_input_cutoffs is None:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.input_size, padding)
            size_in = config.input_size
        else:
            self.embed_tokens = AdaptiveInput(
                config.vocab_size,
                padding,
                config.input_size,
                config.adaptive_input_factor,
                width,
                list(config.adaptive_input_cutoffs),
            )
            if config.square_projections == "none":
                leave_out_square_projections(self.embed_tokens)
            size_in = width
        self.embed_scale = math.sqrt(width) if config.scale_embeddings else 1.0
        self.project_in_dim = nn.Linear(size_in, width, bias=False) if size_in != width else None
        self.embed_positions = None
        if config.position_embeddings == "learned":
            self.embed_positions = nn.Embedding(config.max_position_embeddings + _OFFSET, width, _OFFSET - 1)
        self.layernorm_embedding = nn.LayerNorm(width) if config.embedding_norm else None
        self.dropout_module = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList([FastWeightDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.layer_norm = nn.LayerNorm(width) if config.pre_norm and config.final_norm else None
        if config.rms_norm_eps is not None:
            use_rms_norms(self, config.rms_norm_eps, config.zero_centered_norms)
        tied_adaptively = config.adaptive_softmax_cutoffs is not None and config.tie_word_embeddings
        projected = config.output_size != width and not tied_adaptively
        self.project_out_dim = nn.Linear(width, config.output_size, bias=False) if projected else None
        # Rotary embeddings count positions by themselves.
        rotary = any(getattr(mixer, "rotary_dim", 0) for mixer in self.mixers)
        self._follows_places = config.position_embeddings != "none" and not rotary
        self.gradient_checkpointing = False
        self.post_init()

    @property
    def mixers(self) -> list[Mixer]:
        """The mixers of the layers, in order."""
        return [module for module in self.modules() if isinstance(module, Mixer)]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: FastWeightCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        seq_idx: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
    ) -> BaseModelOutputWithPast | tuple[Any, ...]:
        """Reads texts, or the next parts of texts. A row may hold several texts, which do not see each other.

        Args:
            input_ids: (batch, time).
            attention_mask: (batch, time), 0 at padding, on either side; or (batch, length so far), whose end is used.
                Padding is seen by no other position, and takes no position.
            position_ids: (batch, time), places in the texts, from 0; None to count them. Where they begin again,
                another text begins, as in rows of transformers' `DataCollatorWithFlattening`.
            past_key_values: the cache that the call for the part before returned. Layers are not checkpointed then.
            inputs_embeds: (batch, time, size), in place of `input_ids`.
            use_cache: whether to return the cache, and then not to checkpoint layers; None for the configuration's
                value, and in training for False.
            output_attentions: ignored; there are no attention weights to return.
            output_hidden_states: whether to return the input of each layer and the output of the last.
            return_dict: whether to return fields by name instead of a tuple.
            seq_idx: (batch, time), the number of each position's text in its row.
            cu_seq_lens_q, cu_seq_lens_k: the sums of the lengths of texts before each text, and of all, if the texts of
                all rows stood in one; they are the same.
            max_length_q, max_length_k: ignored; the length of the longest text.

        Returns:
            `last_hidden_state`, (batch, time, output_size); `past_key_values`; `hidden_states`.

        Raises:
            ValueError: if an argument is not allowed; the message names it, its value and the allowed ones; also if a
                row holds several texts, and a mixer cannot keep them apart.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise InvalidInput("exactly one of input_ids and inputs_embeds must be given")
        keep_states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        by_name = self.config.return_dict if return_dict is None else return_dict
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        cache = past_key_values
        if inputs_embeds is None:
            check_whole("input_ids", input_ids, dims=2)
        elif not isinstance(inputs_embeds, Tensor) or inputs_embeds.dim() != 3:
            raise InvalidInput(f"inputs_embeds is a {type(inputs_embeds).__name__}; it must be (batch, time, size)")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        rows, time = x.shape[:2]
        if cache is not None:
            cache = check_cache(cache, len(self.layers), rows)
        elif use_cache:
            cache = FastWeightCache(len(self.layers))
        if cu_seq_lens_k is not None:
            check_whole("cu_seq_lens_k", cu_seq_lens_k, dims=1)
        if cu_seq_lens_k is not None and (cu_seq_lens_q is None or not torch.equal(cu_seq_lens_q, cu_seq_lens_k)):
            raise InvalidInput("cu_seq_lens_k is not cu_seq_lens_q; they must be the same, as a text is read whole")
        texts = read_texts(
            (rows, time),
            x.device,
            cache,
            attention_mask=attention_mask,
            position_ids=position_ids,
            seq_idx=seq_idx,
            cu_seq_lens=cu_seq_lens_q,
            skips=self._follows_places,
        )
        if texts.starts is not None:
            check_takes_starts(self.config.mixers, self.mixers)

        # fairseq's order: scale, projection, positions, norm, dropout.
        x = self.embed_scale * x
        if self.project_in_dim is not None:
            x = self.project_in_dim(x)
        x = self._add_positions(x, texts.places, whole=position_ids is not None, cache=cache)
        if self.layernorm_embedding is not None:
            x = self.layernorm_embedding(x)
        x = self.dropout_module(x)
        states: tuple[Any, ...] = ()
        drop = self.config.layerdrop if self.training and cache is None else 0.0  # a state must have read all
        for layer in self.layers:
            if keep_states:
                states += (x,)
            if drop and torch.rand(()) <= drop:
                continue
            x = layer(x, padding=texts.padding, starts=texts.starts, past_key_values=cache)
        if cache is not None:
            cache.advance(time, texts.read)
        if self.layer_norm is not None:
            x = self.layer_norm(x)
        if self.project_out_dim is not None:
            x = self.project_out_dim(x)
        out = BaseModelOutputWithPast(
            last_hidden_state=x,
            past_key_values=cache if use_cache else None,
            hidden_states=(*states, x) if keep_states else None,
        )
        return out if by_name else out.to_tuple()

    def _add_positions(self, x: Tensor, places: Tensor, *, whole: bool, cache: FastWeightCache | None) -> Tensor:
        """Adds positional embeddings; `whole`: whether places may be larger than the number of tokens so far."""
        if self.config.position_embeddings == "none":
            return x
        if self.embed_positions is None:
            encoded = sinusoidal_positions(places, x.shape[-1], x.dtype)
        else:
            most = self.config.max_position_embeddings
            # Only where it may be too long does the CPU wait for a GPU, to say so.
            whole = whole or x.shape[1] + (0 if cache is None else cache.get_seq_length()) > most
            if whole and not places.is_meta and (end := int(places.max()) + 1) > most:
                raise InvalidInput(f"input_ids ends at position {end} of a text; max_position_embeddings is {most}")
            encoded = self.embed_positions(places + _OFFSET)
        return x + encoded


class FastWeightForCausalLM(FastWeightPreTrainedModel, GenerationMixin):
    """A language model: `FastWeightModel` and its output layer.

    With an adaptive softmax its logits are log-probabilities.

    Args:
        config: the model's settings.

    Examples:
        >>> config = FastWeightConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
        >>> model = FastWeightForCausalLM(config).eval()
        >>> model(torch.tensor([[2, 5, 6, 7]])).logits.shape
        torch.Size([1, 4, 40])
        >>> model.generate(torch.tensor([[2, 5, 6, 7]]), max_new_tokens=3, do_sample=False, eos_token_id=None).shape
        torch.Size([1, 7])
    """

    _tied_weights_keys: dict[str, str] = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: FastWeightConfig) -> None:
        super().__init__(config)
        self.model = FastWeightModel(config)
        self.vocab_size = config.vocab_size
        assert config.output_size is not None
        self.lm_head: nn.Module
        if config.adaptive_softmax_cutoffs is None:
            self.lm_head = nn.Linear(config.output_size, config.vocab_size, bias=False)
        else:
            embeddings = self.model.embed_tokens if config.tie_word_embeddings else None
            self.lm_head = AdaptiveSoftmax(
                config.vocab_size,
                config.output_size,
                list(config.adaptive_softmax_cutoffs),
                dropout=config.adaptive_softmax_dropout,
                factor=config.adaptive_softmax_factor,
                tied=None if embeddings is None else [cluster[0].embedding_dim for cluster in embeddings.embeddings],
                projections=config.tie_adaptive_projections,
                hidden_size=config.hidden_size,
            )
            if config.square_projections == "none":
                leave_out_square_projections(softmax=self.lm_head)
            if config.adaptive_softmax_bias:
                add_biases(self.lm_head)
            if isinstance(embeddings, AdaptiveInput):
                tied = tied_clusters(embeddings, self.lm_head, config.tie_adaptive_projections)
                self._tied_weights_keys = {f"lm_head.{a}": f"model.embed_tokens.{b}" for a, b in tied.items()}
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self and isinstance(self.lm_head, nn.Linear) and self.config.initializer_range is None:
            nn.init.normal_(self.lm_head.weight, std=self.lm_head.in_features**-0.5)

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        """Checks the arguments that `generate` passes on to the model, before transformers uses the cache."""
        if model_kwargs.get("past_key_values") is not None:
            check_kind(model_kwargs["past_key_values"])
        super()._validate_model_kwargs(model_kwargs)  # type: ignore[misc]

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # it makes a cache of its own

    def get_output_embeddings(self) -> nn.Module | None:
        """The output layer; None for an adaptive softmax, which has several matrices."""
        return self.lm_head if isinstance(self.lm_head, nn.Linear) else None

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: FastWeightCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        seq_idx: Tensor | None = None,
        **options: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Computes logits, and the loss if labels are given.

        Args:
            labels: (batch, time), a copy of `input_ids` with -100 where nothing is to be predicted: each position
                predicts the label of the next.
            logits_to_keep: number of positions at the end to compute logits for, 0 for all; or the positions, a tensor.
            options: those of transformers' loss for language models, from its Trainer; and the other arguments of
                `FastWeightModel.forward`, as the rest of those above.

        Returns:
            `loss`; `logits`, (batch, positions, vocab_size); `past_key_values`; `hidden_states`.

        Raises:
            ValueError: if an argument is not allowed; the message names it, its value and the allowed ones.
            TypeError: for an unknown argument.
        """
        lengths = {name: options.pop(name) for name in _LENGTHS if name in options}
        if unknown := set(options) - _LOSS_OPTIONS:
            raise TypeError(f"forward() got an unexpected keyword argument {min(unknown)!r}")
        by_name = self.config.return_dict if return_dict is None else return_dict
        outputs = self.model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            seq_idx=seq_idx,
            **lengths,
        )
        features = outputs.last_hidden_state
        if not isinstance(logits_to_keep, int):
            check_whole("logits_to_keep", logits_to_keep, dims=1)
        # slice(-0, None) keeps all positions.
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(in_rows(features[:, kept]))
        if self.config.masked_tokens:
            masked = torch.tensor(self.config.masked_tokens, device=logits.device)
            logits = logits.index_fill(-1, masked, MASKED_LOGIT)
        loss = None
        if labels is not None:
            check_whole("labels", labels, dims=2)
            # transformers shifts the labels by one position.
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **options)
        out = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
        )
        return out if by_name else out.to_tuple()
