"""Finds and loads models that fairseq trained, as models of `fairseq_fastweights.huggingface`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from fairseq import checkpoint_utils
from fairseq.data import Dictionary
from fairseq.models.transformer import TransformerDecoder
from fairseq.models.transformer_lm import TransformerLanguageModel
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from transformers.initialization import no_init_weights

from fairseq_fastweights.conversion.files.checkpoints import options_in, read_state
from fairseq_fastweights.conversion.files.folders import RECORD, path_of
from fairseq_fastweights.conversion.tokenizers.settings import find_kept, generation_config
from fairseq_fastweights.conversion.tokenizers.to_transformers import find_pieces, make_tokenizer, original_ids
from fairseq_fastweights.huggingface.modeling import FastWeightForCausalLM
from fairseq_fastweights.invalid_input import InvalidInput
from fairseq_fastweights.models.description import config_of, new_name

_CHECKPOINTS = ("model.pt", "checkpoint_best.pt", "checkpoint_last.pt")
"""The checkpoints that are looked for in a folder, in this order."""


@dataclass(frozen=True)
class Run:
    """A checkpoint and the files that belong to it.

    Attributes:
        checkpoint: the file.
        dictionary: the file dict.txt.
        pieces: the folder of the tokenizer whose token ids are the words of the dictionary; None if they are words.
        kept: the folder with the settings of a tokenizer and of generation from a Hugging Face folder; None for none.
        types: the dtypes of the checkpoint's weights.
        updates: number of updates after which it was written; None if unknown.
    """

    checkpoint: Path
    dictionary: Path
    pieces: Path | None
    kept: Path | None
    types: frozenset[Any]
    updates: int | None


def load_for_causal_lm(
    path: str | Path, *, data: str | Path | None = None, tokenizer: str | Path | None = None
) -> tuple[FastWeightForCausalLM, PreTrainedTokenizerFast]:
    """Loads a checkpoint of fairseq as a model and a tokenizer of transformers.

    Args:
        path: the checkpoint, or a folder with model.pt, checkpoint_best.pt or checkpoint_last.pt.
        data: the folder with its dict.txt; None to search the checkpoint's folder, and then that of the training data.
        tokenizer: the folder of the tokenizer whose token ids are in dict.txt (tokenizer.json and tokenizer_words.json,
            or encoder.json and vocab.bpe); "words" if dict.txt has words; None to search beside dict.txt, beside the
            checkpoint, and in the `--transfer-from` of the training.

    Returns:
        The model, in evaluation mode and in the dtype of the checkpoint, and the tokenizer. Both use the ids of the
        dictionary.

    Raises:
        ValueError: if a file is missing or cannot be used; the message names it and says why.

    Examples:
        >>> model, tokenizer = load_for_causal_lm("checkpoints/lm", data="data-bin/lm")  # doctest: +SKIP
        >>> prompt = tokenizer("the value of", return_tensors="pt")  # doctest: +SKIP
        >>> print(tokenizer.decode(model.generate(**prompt, max_new_tokens=20)[0]))  # doctest: +SKIP
    """
    model, tokens, _ = load_run(find_run(path, data, tokenizer))
    return model, tokens


def find_run(
    path: str | Path,
    data: str | Path | None = None,
    tokenizer: str | Path | None = None,
    checkpoint: Path | None = None,
) -> Run:
    """Finds the files of a run.

    Args:
        path, data, tokenizer: as for `load_for_causal_lm`.
        checkpoint: another checkpoint of the model in the folder `path`, trained further.
    """
    path = path_of("path", path)
    data = None if data is None else path_of("data", data)
    tokenizer = None if tokenizer is None else path_of("tokenizer", tokenizer)
    if checkpoint is not None:
        data = path if data is None and (path / "dict.txt").is_file() else data
        path = checkpoint
    checkpoint = path
    if path.is_dir():
        found = [path / name for name in _CHECKPOINTS if (path / name).is_file()]
        if not found:
            raise InvalidInput(f"{path}: there is no checkpoint; it must hold one of {', '.join(_CHECKPOINTS)}")
        checkpoint = found[0]
    if not checkpoint.is_file():
        raise InvalidInput(f"{path}: there is no such checkpoint")
    state = read_state(checkpoint)
    task = options_in(state, "task")
    trained_on = str(task.get("data") or "").split(":")[0]
    places = [checkpoint.parent, *([Path(trained_on)] if trained_on else [])] if data is None else [data]
    dictionary = next((place / "dict.txt" for place in places if (place / "dict.txt").is_file()), None)
    if dictionary is None:
        raise InvalidInput(
            f"{checkpoint}: there is no dict.txt in {' or '.join(map(str, places))}; the option data names the folder "
            "of the data that it was trained on"
        )
    # A run that started from a converted model has its tokenizer there.
    nearby = [dictionary.parent, checkpoint.parent]
    if isinstance(given := task.get("transfer_from"), str):
        nearby.append(Path(given) if Path(given).is_dir() else Path(given).parent)
    history = state.get("optimizer_history")
    pieces = find_pieces(dictionary, nearby, tokenizer)
    return Run(
        checkpoint,
        dictionary,
        pieces,
        find_kept(nearby if pieces is None else [pieces, *nearby]),
        frozenset(weight.dtype for weight in state["model"].values() if weight.is_floating_point()),
        history[-1].get("num_updates") if history else None,
    )


def load_run(run: Run) -> tuple[FastWeightForCausalLM, PreTrainedTokenizerFast, Dictionary]:
    """Loads the model of a run, its tokenizer and its dictionary. Raises a `ValueError` if a file cannot be used."""
    for module in ("models.fast_weight_lm", "tasks.fast_weight_language_modeling"):  # registers them for fairseq
        import_module(f"fairseq_fastweights.{module}")
    try:
        loaded, _, task = checkpoint_utils.load_model_ensemble_and_task(
            [str(run.checkpoint)], arg_overrides={"data": str(run.dictionary.parent)}
        )
        (theirs,) = loaded
        _check_kind(theirs, task)
        config = config_of(theirs.decoder.args, task.dictionary)
    except (ValueError, RuntimeError, KeyError, TypeError, AttributeError, AssertionError) as error:
        lines = str(error).split("\n")[:2]  # torch lists all weights that do not fit: the heading, and the first
        text = " ".join(map(str.strip, lines)) or type(error).__name__
        named = text.startswith(str(run.checkpoint))  # as in messages of the patched fairseq
        raise InvalidInput(text if named else f"{run.checkpoint}: {text}") from error
    with no_init_weights():
        ours = FastWeightForCausalLM(config)
    ours.tie_weights()  # which no_init_weights leaves out
    weights = weights_of(theirs)
    ours.load_state_dict(weights, strict=False)
    if different := sorted(set(ours.state_dict()) ^ set(weights)):
        raise InvalidInput(f"{run.checkpoint}: {len(different)} weights do not fit the model, {different[0]} for one")
    # fairseq builds models in float32, whatever the checkpoint holds.
    if len(run.types) == 1:
        (dtype,) = run.types
        ours.to(dtype)
        config.dtype = dtype
    ours.generation_config = generation_config(run.kept, config, _kept_ids(run, task.dictionary))
    return ours.eval(), make_tokenizer(task.dictionary, run.pieces, config, run.kept), task.dictionary


def weights_of(model: TransformerLanguageModel) -> dict[str, Tensor]:
    """The weights of fairseq's model by their names in `fairseq_fastweights.huggingface`."""
    weights = dict(model.named_parameters(remove_duplicate=False))
    weights |= {name: x for name, x in model.named_buffers() if name.endswith(".feature_map.features")}
    return {new_name(name): weight.detach() for name, weight in weights.items()}


def _kept_ids(run: Run, dictionary: Dictionary) -> Callable[[int], int | None]:
    """The ids in the dictionary of token ids in the run's kept settings."""
    if run.kept is None or not (run.kept.parent / RECORD).is_file():  # an exported model's own
        return lambda number: number if number < len(dictionary) else None
    id_of = original_ids(dictionary, run.kept.parent / RECORD)
    return lambda number: None if id_of(number) == dictionary.unk() else id_of(number)


def _check_kind(model: Any, task: Any) -> None:
    if not isinstance(model, TransformerLanguageModel) or not isinstance(model.decoder, TransformerDecoder):
        raise InvalidInput(f"this is a {type(model).__name__}; it must be a language model: fast_weight_lm")
    if len(task.target_dictionary) != len(task.dictionary):
        raise InvalidInput(
            f"output_dictionary_size is {len(task.target_dictionary)}; it must be the dictionary's, "
            f"{len(task.dictionary)}"
        )
