"""Converts language models that fairseq trained into models of `fairseq_fastweights.huggingface`."""

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
from omegaconf import OmegaConf
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from transformers.initialization import no_init_weights

from fairseq_fastweights.conversion.files.checkpoints import read_state
from fairseq_fastweights.conversion.files.folders import (
    FOR_FAIRSEQ,
    RECORD,
    check_target,
    copy_files,
    file_in,
    new_folder,
    path_of,
)
from fairseq_fastweights.conversion.from_huggingface.published import source_mixers
from fairseq_fastweights.conversion.to_huggingface.original_class import restore_original
from fairseq_fastweights.conversion.to_huggingface.tokenizers import find_pieces, make_tokenizer, source_numbers
from fairseq_fastweights.conversion.tokenizers import tokenizer_json
from fairseq_fastweights.conversion.tokenizers.byte_level_files import PIECES
from fairseq_fastweights.conversion.tokenizers.kept_settings import find_kept, generation_config
from fairseq_fastweights.huggingface.modeling import FastWeightForCausalLM
from fairseq_fastweights.invalid_input import InvalidInput
from fairseq_fastweights.models import checkpoint_settings
from fairseq_fastweights.models.description import config_of, new_name

_CHECKPOINTS = ("model.pt", "checkpoint_best.pt", "checkpoint_last.pt")
"""The checkpoints that are looked for in a folder, in this order."""


@dataclass(frozen=True)
class Run:
    """A checkpoint and the files that belong to it.

    Attributes:
        checkpoint: the file.
        dictionary: the file dict.txt.
        pieces: the folder of the tokenizer whose numbers are the words of the dictionary; None if they are words.
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
        tokenizer: the folder of the tokenizer whose numbers are in dict.txt (tokenizer.json and tokenizer_words.json,
            or encoder.json and vocab.bpe); "words" if dict.txt has words; None to search beside dict.txt, beside the
            checkpoint, and in the `--transfer-from` of the training.

    Returns:
        The model, in evaluation mode and in the dtype of the checkpoint, and the tokenizer. Both use the numbers of the
        dictionary.

    Raises:
        ValueError: if a file is missing or cannot be used; the message names it and says why.

    Examples:
        >>> model, tokenizer = load_for_causal_lm("checkpoints/lm", data="data-bin/lm")  # doctest: +SKIP
        >>> prompt = tokenizer("the value of", return_tensors="pt")  # doctest: +SKIP
        >>> print(tokenizer.decode(model.generate(**prompt, max_new_tokens=20)[0]))  # doctest: +SKIP
    """
    return load_run(find_run(path, data, tokenizer))


def load_run(run: Run) -> tuple[FastWeightForCausalLM, PreTrainedTokenizerFast]:
    """Loads the model and the tokenizer of a run, as `load_for_causal_lm`.

    Raises:
        ValueError: if a file cannot be used; the message names it and says why.
    """
    model, dictionary = read_model(run)
    return model, make_tokenizer(dictionary, run.pieces, model.config, run.kept)


def to_huggingface(
    source: Path,
    target: Path,
    *,
    checkpoint: Path | None = None,
    data: Path | None = None,
    tokenizer: str | Path | None = None,
) -> None:
    """Makes a Hugging Face folder: config.json, model.safetensors, generation_config.json and a tokenizer.

    A model that `from_huggingface` converted, and that still has its source's mixers, gets the class that it came from.
    All others get `FastWeightForCausalLM`, and a subfolder `fairseq` for the conversion back.

    Args:
        source: the checkpoint or its folder, as `path` of `load_for_causal_lm`.
        target: the new folder.
        checkpoint: another checkpoint, with the dictionary and tokenizer of `source`.
        data: the folder with its dict.txt, as for `load_for_causal_lm`.
        tokenizer: the folder of its tokenizer, as for `load_for_causal_lm`.

    Raises:
        ValueError: if a file is missing or cannot be used; nothing is written then.
        OSError: if the target cannot be written; nothing is left of it.
    """
    source, target = path_of("source", source), path_of("target", target)
    check_target(target)
    if has_source_mixers(source, checkpoint):
        restore_original(source, target, checkpoint)
        return
    run = find_run_of(source, checkpoint, data, tokenizer)
    places = {"dict.txt": run.dictionary.parent}
    if run.pieces is not None:
        places |= dict.fromkeys((*PIECES, *tokenizer_json.FILES), run.pieces)
    copied = {name: path for name, place in places.items() if (path := file_in(place, name))}
    model, dictionary = read_model(run)
    made = make_tokenizer(dictionary, run.pieces, model.config, run.kept)
    with new_folder(target) as folder:
        try:
            model.save_pretrained(folder)
        except SafetensorError as error:
            raise OSError(f"model.safetensors: {error}") from error
        made.save_pretrained(folder)
        copy_files(copied, folder / FOR_FAIRSEQ)


def find_run_of(
    source: Path, checkpoint: Path | None = None, data: str | Path | None = None, tokenizer: str | Path | None = None
) -> Run:
    """Finds the files of a run, as the arguments of `to_huggingface` name them.

    Raises:
        ValueError: if a file is missing; the message names it.
    """
    if data is None and checkpoint is not None and (source / "dict.txt").is_file():
        data = source
    return find_run(source if checkpoint is None else checkpoint, data, tokenizer)


def find_run(path: str | Path, data: str | Path | None = None, tokenizer: str | Path | None = None) -> Run:
    """Finds the files of a run.

    Raises:
        ValueError: if a file is missing; the message names it.
    """
    checkpoint = path = path_of("path", path)
    data = None if data is None else path_of("data", data)
    tokenizer = None if tokenizer is None else path_of("tokenizer", tokenizer)
    if path.is_dir():
        found = [path / name for name in _CHECKPOINTS if (path / name).is_file()]
        if not found:
            raise InvalidInput(f"{path}: there is no checkpoint; it must hold one of {', '.join(_CHECKPOINTS)}")
        checkpoint = found[0]
    if not checkpoint.is_file():
        raise InvalidInput(f"{path}: there is no such checkpoint")
    state = read_state(checkpoint)
    task = _task_of(state)
    trained_on = str(task.get("data") or "").split(":")[0]
    places = [checkpoint.parent, *([Path(trained_on)] if trained_on else [])] if data is None else [data]
    dictionary = next((place / "dict.txt" for place in places if (place / "dict.txt").is_file()), None)
    if dictionary is None:
        raise InvalidInput(
            f"{checkpoint}: there is no dict.txt in {' or '.join(str(place) for place in places)}; the option data "
            "names the folder of the data that it was trained on"
        )
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


def read_model(run: Run) -> tuple[FastWeightForCausalLM, Dictionary]:
    """Reads the model in a run's checkpoint, and its dictionary.

    Raises:
        ValueError: if the checkpoint cannot be used; the message names it and says why.
    """
    for module in ("models.fast_weight_lm", "models.huggingface_architectures", "tasks.fast_weight_language_modeling"):
        import_module(f"fairseq_fastweights.{module}")
    try:
        loaded, _, task = checkpoint_utils.load_model_ensemble_and_task(
            [str(run.checkpoint)], arg_overrides={"data": str(run.dictionary.parent)}
        )
        (theirs,) = loaded
        _check_kind(theirs, task)
        decoder = theirs.decoder
        config = config_of(decoder.args, task.dictionary)
    except (ValueError, RuntimeError, KeyError, TypeError, AttributeError, AssertionError) as error:
        lines = str(error).split("\n")[:2]  # of torch's lists of weights that do not fit: what it is, and the first
        text = " ".join(map(str.strip, lines)) or type(error).__name__
        named = text.startswith(str(run.checkpoint))  # as what our fairseq says
        raise InvalidInput(text if named else f"{run.checkpoint}: {text}") from error
    with no_init_weights():
        ours = FastWeightForCausalLM(config)
    ours.tie_weights()  # which is a part of the initialisation
    ours.load_state_dict(weights_of(theirs), strict=False)
    check_all_loaded(run.checkpoint, ours, weights_of(theirs))
    if len(run.types) == 1:
        ours.to(next(iter(run.types)))
        config.dtype = next(iter(run.types))
    ours.generation_config = generation_config(run.kept, config, _numbers(run, task.dictionary))
    return ours.eval(), task.dictionary


def _numbers(run: Run, dictionary: Dictionary) -> Callable[[int], int | None]:
    """The numbers in the dictionary of the word types in the run's kept settings."""
    if run.kept is None or not (run.kept.parent / RECORD).is_file():  # an exported model's own
        return lambda number: number if number < len(dictionary) else None
    number_of = source_numbers(dictionary, run.kept.parent / RECORD)
    return lambda number: None if number_of(number) == dictionary.unk() else number_of(number)


def weights_of(model: TransformerLanguageModel) -> dict[str, Tensor]:
    """The weights of fairseq's model by their names in `fairseq_fastweights.huggingface`."""
    weights = dict(model.named_parameters(remove_duplicate=False))
    weights |= {name: x for name, x in model.named_buffers() if name.endswith(".feature_map.features")}
    return {new_name(name): weight.detach() for name, weight in weights.items()}


def check_all_loaded(source: Path, model: FastWeightForCausalLM, weights: dict[str, Tensor]) -> None:
    """Raises a `ValueError` unless `weights` has the names of the model's weights."""
    own = set(model.state_dict())
    if different := sorted(own ^ set(weights)):
        raise InvalidInput(f"{source}: {len(different)} weights do not fit the model, {different[0]} for one")


def has_source_mixers(folder: Path, checkpoint: Path | None = None) -> bool:
    """True if a folder was converted, and the model in a checkpoint, or in it, has its source's mixers, by settings."""
    if not (folder / RECORD).is_file():
        return False
    checkpoint = checkpoint or folder / "model.pt"
    if not checkpoint.is_file():
        return True
    weights = read_state(checkpoint)["model"]
    settings = checkpoint_settings.read(weights, "decoder")
    return settings is None or bool(settings.get("mixers") == source_mixers(folder))


def _check_kind(model: Any, task: Any) -> None:
    if not isinstance(model, TransformerLanguageModel) or not isinstance(model.decoder, TransformerDecoder):
        raise InvalidInput(f"this is a {type(model).__name__}; it must be a language model: fast_weight_lm")
    if len(task.target_dictionary) != len(task.dictionary):
        raise InvalidInput(
            f"output_dictionary_size is {len(task.target_dictionary)}; it must be the dictionary's, "
            f"{len(task.dictionary)}"
        )


def _task_of(state: dict[str, Any]) -> dict[str, Any]:
    """The options of the task in a checkpoint, of either format."""
    cfg, args = state.get("cfg"), state.get("args")
    if OmegaConf.is_config(cfg):
        cfg = OmegaConf.to_container(cfg, resolve=False)
    if isinstance(cfg, dict):
        return dict(cfg.get("task") or {})
    return {} if args is None else dict(vars(args))
