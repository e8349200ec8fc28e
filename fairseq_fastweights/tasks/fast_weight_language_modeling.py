"""The task `fast_weight_language_modeling`: streams, carried-over states, documents, windows, transferred weights."""

# No `from __future__ import annotations` here: fairseq reads the types of a configuration's fields as they stand.

import logging
import os
from argparse import ArgumentParser
from dataclasses import dataclass, field
from typing import Any

import torch
from fairseq import utils
from fairseq.data import FairseqDataset, data_utils, indexed_dataset, iterators
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask
from omegaconf import II

from fairseq_fastweights.conversion.transfer.base_model import (
    BaseModel,
    check_dictionary,
    find_files,
    follow_heads,
    read_base_model,
)
from fairseq_fastweights.conversion.transfer.freezing import Freezing
from fairseq_fastweights.conversion.transfer.options import TransferOptions, check_options, parse_groups
from fairseq_fastweights.conversion.transfer.weights import Transfer
from fairseq_fastweights.data.corpus import Documents, PackedDocuments, TokenCorpus
from fairseq_fastweights.data.segment_iterator import CarriesStates, SegmentIterator
from fairseq_fastweights.data.segment_streams import SegmentStreams
from fairseq_fastweights.data.sliding_windows import SlidingWindows
from fairseq_fastweights.invalid_input import InvalidInput
from fairseq_fastweights.layers import MASKED_LOGIT
from fairseq_fastweights.models.fast_weight_decoder import FastWeightDecoder
from fairseq_fastweights.models.option_checks import (
    check_architecture,
    check_criterion,
    check_is_language_model,
    check_positions,
    check_ranges,
    check_unread_settings,
)
from fairseq_fastweights.tasks.pace import reported

logger = logging.getLogger(__name__)

# How many tokens at a split's beginning are searched for symbols that a model masks: two seconds, in lines of 20.
_SEARCHED = 1_000_000


@dataclass
class FastWeightTaskOptions(TransferOptions):
    """The options that the task adds to those of fairseq's `language_modeling`."""

    carry_over_state: bool = field(
        default=False,
        metadata={
            "help": "read the corpus as --batch-size contiguous streams in segments of --tokens-per-sample tokens, "
            "each of which starts with the state that the one before left, without gradients; fairseq-eval-lm reads "
            "one stream unless --batch-size is given (default: off)"
        },
    )
    reset_state_probability: float = field(
        default=0.0,
        metadata={
            "help": "in training with --carry-over-state, the probability with which a segment starts in an empty "
            "state instead of that of the segment before; which segments these are follows from --seed, the epoch and "
            "their place in the text (default: 0.0)"
        },
    )
    text_streams: int = field(
        default=0,
        metadata={
            "help": "read the training text as this many contiguous streams, a segment of each at a time, as "
            "Transformer-XL's program does, though every segment starts in an empty state; it must be a multiple of "
            "--batch-size times the number of processes, and is to be that times --update-freq. 0 is segments in "
            "random order (default: 0)"
        },
    )
    separate_documents: bool = field(
        default=False,
        metadata={
            "help": "read every document as if it stood alone, though segments hold several: memories, attention and "
            "positions start again at each; empty lines end documents, as with --sample-break-mode complete_doc "
            "(default: off)"
        },
    )


@dataclass
class FastWeightLanguageModelingConfig(LanguageModelingConfig, FastWeightTaskOptions):
    """Options of the task: those of fairseq's `language_modeling`, and its own."""

    train_subset: str = II("dataset.train_subset")


@register_task("fast_weight_language_modeling", dataclass=FastWeightLanguageModelingConfig)
class FastWeightLanguageModelingTask(LanguageModelingTask):
    """fairseq's language modelling, with states that are carried from segment to segment (--carry-over-state).

    Evaluation in a sliding window (fairseq-eval-lm --context-window) skips the output layer for positions that are not
    scored. Documents in one segment can be kept apart (--separate-documents). Training can start from the weights of a
    Transformer (--transfer-from).
    """

    def __init__(self, args: Any, *others: Any, **named: Any) -> None:
        super().__init__(args, *others, **named)
        check_ranges(args)
        if args.tokens_per_sample < 1:
            raise InvalidInput(
                f"tokens_per_sample without the context window is {args.tokens_per_sample}; it must be at least 1"
            )
        # True as long as every model that was built (an ensemble has several) has a decoder of this project.
        self._all_take_last_positions = True
        self._has_adaptive_softmax = False
        # Symbols that one of these models never predicts.
        self._masked_symbols: set[int] = set()
        self._freezing: Freezing | None = None
        # The model in training, whose states checkpoints keep.
        self._carrier: CarriesStates | None = None
        for option in ("carry_over_state", "separate_documents", "text_streams"):
            if getattr(args, option):
                self._check_text(args, option)
        if args.reset_state_probability and not args.carry_over_state:
            raise InvalidInput(
                f"reset_state_probability is {args.reset_state_probability}; without carry_over_state it must be 0: "
                "every segment starts in an empty state"
            )
        if args.text_streams and args.carry_over_state:
            raise InvalidInput(
                f"text_streams is {args.text_streams}; with carry_over_state it must be 0: the streams are "
                "--batch-size times the processes then"
            )

    @classmethod
    def add_args(cls, parser: ArgumentParser) -> None:
        """Adds its own options as a group, and fairseq's."""
        gen_parser_from_dataclass(
            parser.add_argument_group("carried states and transferred weights"), FastWeightTaskOptions()
        )
        super().add_args(parser)

    @staticmethod
    def _check_text(args: Any, option: str) -> None:
        """Raises a `ValueError` if an option changes the text in samples, which `option` does not allow."""
        wanted_of: dict[str, tuple[object, ...]] = {
            "sample_break_mode": ("none", None, "complete"),
            "shorten_method": ("none",),
            "add_bos_token": (False,),
            "self_target": (False,),
            "past_target": (False,),
        }
        why = "segments are filled with text as it stands, document after document"
        if option in ("carry_over_state", "text_streams"):
            wanted_of["sample_break_mode"] = ("none", None)
            wanted_of |= {"pad_to_fixed_length": (False, None), "pad_to_fixed_bsz": (False, None)}
            why = "streams are contiguous text, neither shuffled nor padded"
        for name, wanted in wanted_of.items():
            value = getattr(args, name)
            if (None if value is None else getattr(value, "value", value)) not in wanted:
                raise InvalidInput(f"{name} is {value}; with {option} it must be {wanted[0]}: {why}")

    def build_model(self, args: Any, from_checkpoint: bool = False) -> Any:
        check_is_language_model(args)
        if not from_checkpoint:
            check_architecture(args)
            check_unread_settings(args)
        # A model from a checkpoint has its trained weights already.
        base = None if from_checkpoint else self._read_base_model()
        if base is not None:
            follow_heads(args, base, parse_groups("transfer", self.args.transfer))
        model = super().build_model(args, from_checkpoint)
        ours = isinstance(getattr(model, "decoder", None), FastWeightDecoder)
        self._all_take_last_positions &= ours
        self._has_adaptive_softmax = getattr(getattr(model, "decoder", None), "adaptive_softmax", None) is not None
        if ours:
            self._masked_symbols.update(model.decoder.masked_symbols)
        for option, why in (
            ("carry_over_state", "has no state to carry"),
            ("separate_documents", "does not tell documents apart"),
        ):
            if getattr(self.args, option) and not ours:
                raise InvalidInput(f"{option} is set, but {type(model).__name__} {why}; it must be fast_weight_lm")
        if self.args.carry_over_state:
            model.decoder.check_carries()
        if self.args.separate_documents:
            model.decoder.check_takes_starts()
        # The model in training, unlike one that evaluates, has its states written to checkpoints.
        if self.args.carry_over_state and not from_checkpoint:
            self._carrier = model.decoder
            for concern in sorted({mixer.concern_when_carried() or "" for mixer in model.decoder.mixers} - {""}):
                logger.warning("carry_over_state: %s", concern)
        if not from_checkpoint:
            check_positions(model, self.args)
        if base is not None:
            self._transfer(model, base)
        return model

    def build_criterion(self, args: Any) -> Any:
        """Builds the criterion, after a check that it is one for the model."""
        check_criterion(args, self._has_adaptive_softmax)
        return super().build_criterion(args)

    def _read_base_model(self) -> BaseModel | None:
        """The model to transfer from, if there is one and its dictionary is that of the data."""
        check_options(self.args)
        if self.args.transfer_from is None:
            return None
        file, dictionary = find_files(self.args.transfer_from)
        check_dictionary(dictionary, self.dictionary)
        return read_base_model(file)

    def _transfer(self, model: Any, base: BaseModel) -> None:
        options = self.args
        made = Transfer(model, base, parse_groups("transfer", options.transfer))
        frozen = made.freeze(parse_groups("freeze", options.freeze))
        logger.info("%s", made)
        if len(frozen) == len(list(model.parameters())) and options.unfreeze_threshold is None:
            raise InvalidInput(f"freeze is {options.freeze!r}, which leaves nothing to train")
        if options.dry_run:
            raise SystemExit(0)
        if options.unfreeze_threshold is not None:
            settings = (options.unfreeze_threshold, options.unfreeze_patience, options.unfreeze_interval)
            self._freezing = Freezing(frozen, *settings)
            return
        for parameter in frozen:
            parameter.requires_grad_(False)

    def train_step(
        self, sample: Any, model: Any, criterion: Any, optimizer: Any, *others: Any, **named: Any
    ) -> tuple[Any, Any, Any]:
        """Runs fairseq's step, and removes the gradients of frozen parameters."""
        if self._freezing is not None:
            self._freezing.attach(optimizer)
        results = super().train_step(sample, model, criterion, optimizer, *others, **named)
        if self._freezing is not None:
            self._freezing.drop_gradients(optimizer)
        return results

    def optimizer_step(self, optimizer: Any, model: Any, update_num: int) -> None:
        """Runs fairseq's step, which does not change frozen parameters."""
        if self._freezing is not None:
            self._freezing.drop_gradients(optimizer)  # once more: processes that add theirs up fill in zeros
        super().optimizer_step(optimizer, model=model, update_num=update_num)

    def reduce_metrics(self, logging_outputs: Any, criterion: Any) -> None:
        """Runs fairseq's reduction; in training, the losses of all processes are also noted for unfreezing."""
        super().reduce_metrics(logging_outputs, criterion)
        if self._freezing is not None and criterion.training:
            self._freezing.observe(logging_outputs)

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **others: Any) -> None:
        """Loads a split; with --carry-over-state as one long text, otherwise as fairseq does.

        Warns if it holds symbols that a model built before never predicts.

        Raises:
            ValueError: if it holds no token, if the context window leaves no token of a sample to score, or with
                --separate-documents, if it has no empty line.
            FileNotFoundError: if it does not exist.
        """
        corpus = self._load_corpus(split, epoch, combine)  # in any case, for its message if there is no token
        self._search_for_masked_symbols(corpus)
        documents = self._documents_of(corpus)
        if documents is not None:
            logger.info("split %r has %s documents", split, f"{len(documents):,}")
        if self.args.carry_over_state or (self.args.text_streams and split == self.args.train_subset):
            self.datasets[split] = corpus
            return
        super().load_dataset(split, epoch=epoch, combine=combine, **others)
        if documents is not None:
            self.datasets[split] = PackedDocuments(self.datasets[split], documents)

    def _documents_of(self, corpus: TokenCorpus) -> Documents | None:
        """The documents of a corpus; None without --separate-documents."""
        return Documents(corpus) if self.args.separate_documents else None

    def _search_for_masked_symbols(self, corpus: TokenCorpus) -> None:
        if not self._masked_symbols:
            return
        corpus.load()
        text = corpus.read(0, min(len(corpus), _SEARCHED))
        found = text[torch.isin(text, torch.tensor(sorted(self._masked_symbols)))]
        if len(found):
            logger.warning(
                "split %r: %s of the first %s tokens are %s, which the model never predicts (mask_special_symbols): "
                "each costs %s nats, so that the perplexity is meaningless or inf. The architectures of GPT-2, Pythia "
                "and RetNet are for dictionaries that have all words of the text, as GPT-2's subwords; "
                "--arch fast_weight_lm has no mask",
                corpus.name,
                f"{len(found):,}",
                f"{len(text):,}",
                " or ".join(self.dictionary[number] for number in found.unique().tolist()),
                f"{-MASKED_LOGIT:,.0f}",
            )

    def get_batch_iterator(self, dataset: FairseqDataset, *others: Any, **named: Any) -> iterators.EpochBatchIterating:
        """fairseq's iterator; with --carry-over-state or --text-streams, one over streams of the corpus, in order."""
        if isinstance(dataset, TokenCorpus):
            return self._iterate_over_streams(dataset, **named)
        return super().get_batch_iterator(dataset, *others, **named)

    def _iterate_over_streams(
        self,
        corpus: TokenCorpus,
        max_sentences: int | None = None,
        num_shards: int = 1,
        shard_id: int = 0,
        epoch: int = 1,
        data_buffer_size: int = 0,
        seed: int = 1,
        **_: Any,
    ) -> SegmentIterator:
        carried = self.args.carry_over_state
        if max_sentences is None:
            option = "carry_over_state" if carried else "text_streams"
            raise InvalidInput(f"batch_size is not set; with {option} it must be the number of parallel streams")
        # Each process reads `max_sentences` streams at a time; without states, an update may add up several batches.
        together = max_sentences * num_shards
        number = together if carried else self.args.text_streams
        if number % together:
            raise InvalidInput(
                f"text_streams is {number}; it must be a multiple of batch_size times the number of processes, "
                f"{together}"
            )
        streams = SegmentStreams(
            corpus,
            number,
            self.args.tokens_per_sample,
            self.dictionary.pad(),
            self._documents_of(corpus),
            carried=carried,
            reset_probability=self.args.reset_state_probability,
            seed=seed,
        )
        return SegmentIterator(
            streams,
            self._carrier,
            batch_sampler=streams.batches(number // max_sentences),
            num_shards=num_shards,
            shard_id=shard_id,
            # The text is in memory. A worker would save nothing and, each time that a checkpoint ends a pass over the
            # validation set, keep training waiting for five seconds.
            num_workers=0,
            epoch=epoch,
            buffer_size=data_buffer_size,
        )

    def build_generator(self, models: Any, args: Any, *others: Any, **named: Any) -> Any:
        """Builds fairseq's generator.

        Raises:
            ValueError: if a corpus with --carry-over-state or --separate-documents is loaded, which the generator does
                not support, except with --score-reference.
        """
        scores = getattr(args, "score_reference", False)
        for option, kind, why in (
            ("carry_over_state", TokenCorpus, "generation starts from empty states"),
            ("separate_documents", PackedDocuments, "generation continues a sample as one text"),
        ):
            if not scores and any(isinstance(loaded, kind) for loaded in self.datasets.values()):
                raise InvalidInput(f"{option} is set, but {why}; it must not be set, or score_reference must be")
        return super().build_generator(models, args, *others, **named)

    @reported
    def eval_lm_dataloader(
        self,
        dataset: FairseqDataset,
        max_tokens: int | None = 36000,
        batch_size: int | None = None,
        max_positions: int | None = None,
        data_buffer_size: int = 10,
        context_window: int = 0,
        **workers: Any,
    ) -> Any:
        """The batches of `fairseq-eval-lm`, which has already subtracted `context_window` from tokens_per_sample.

        Raises:
            ValueError: for a window or a segment that is longer than the model's positions, and for a sliding window
                together with carried-over states, or with --separate-documents over samples of whole lines.
        """
        for option in ("text_streams", "reset_state_probability"):
            if value := getattr(self.args, option):
                raise InvalidInput(f"{option} is {value}; in evaluation it must be 0")
        length = self.args.tokens_per_sample + context_window
        one_text = self.args.sample_break_mode in ("none", None)
        # Samples that end with a line may be shorter; fairseq leaves out those that are too long.
        if one_text and max_positions is not None and length > max_positions:
            raise InvalidInput(
                f"tokens_per_sample is {length}{' (context window included)' if context_window else ''}, but the "
                f"model has {max_positions} positions; it must be at most that"
            )
        if self.args.carry_over_state:
            if context_window:
                raise InvalidInput(
                    f"context_window is {context_window}; with carry_over_state it must be 0: the context is the "
                    "whole text before"
                )
            streams = self.get_batch_iterator(
                dataset, max_sentences=batch_size or 1, data_buffer_size=data_buffer_size, **workers
            )
            return streams.next_epoch_itr(shuffle=False)
        documents = self.args.separate_documents
        if documents and context_window and not one_text:
            raise InvalidInput(
                f"context_window is {context_window} and sample_break_mode {self.args.sample_break_mode}; with "
                "separate_documents it must be none: windows follow the documents"
            )
        # SlidingWindows have no <s> at their start, whole lines, and all words; with a smaller output dictionary
        # fairseq's data sets replace most other words by <unk> not only in targets, but in inputs too, depending on
        # where samples start.
        plain = (
            not self.args.add_bos_token
            and self.args.shorten_method == "none"
            and len(self.output_dictionary) == len(self.dictionary)
        )
        if not (context_window and one_text and (plain or documents) and self._all_take_last_positions):
            return super().eval_lm_dataloader(
                dataset,
                max_tokens=max_tokens,
                batch_size=batch_size,
                max_positions=max_positions,
                data_buffer_size=data_buffer_size,
                context_window=context_window,
                **workers,
            )
        # fairseq gives the data set, not its name; the windows are cut from the corpus itself.
        split = next(name for name, loaded in self.datasets.items() if loaded is dataset)
        corpus = self._load_corpus(split)
        windows = SlidingWindows(corpus, self.args.tokens_per_sample, context_window, self._documents_of(corpus))
        # As fairseq: at most `max_tokens` tokens, counting the context, and `batch_size` windows in a batch.
        most = max(1, (max_tokens or 36000) // length)
        return iterators.EpochBatchIterator(
            dataset=windows,
            collate_fn=windows.collater,
            batch_sampler=windows.batches(min(most, batch_size or most)),
            buffer_size=data_buffer_size,
            disable_shuffling=True,
            **workers,
        ).next_epoch_itr(shuffle=False)

    def _load_corpus(self, split: str, epoch: int = 1, combine: bool = False) -> TokenCorpus:
        # Several folders, joined by ":", are read in turns, one an epoch.
        paths = utils.split_paths(self.args.data)
        path = os.path.join(paths[(epoch - 1) % len(paths)], split)
        binary = indexed_dataset.data_file_path(path)
        # An empty file cannot be mapped: fairseq's reader would fail with mmap's error.
        if os.path.exists(binary) and os.path.getsize(binary) == 0:
            raise InvalidInput(f"split {split!r} holds no tokens; {binary} must not be empty")
        lines = data_utils.load_indexed_dataset(path, self.dictionary, self.args.dataset_impl, combine=combine)
        if lines is None:
            raise FileNotFoundError(f"data: there is no split {split!r} at {path}")
        return TokenCorpus(lines, self.dictionary.eos(), split, self.output_dictionary)
