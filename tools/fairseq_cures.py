"""What keeps fairseq 0.12.2 from running on today's Python and PyTorch, and a cure for each.

A cure is a list of edits of an unpacked source; the comment above it says why it must be. Each edit checks that it
finds what it expects: a cure that silently did nothing would be noticed long after, in somebody's training run.
"""

import json
import shutil
from pathlib import Path
from typing import NamedTuple

from fairseq_checkpoint_cures import CHECKPOINT_CURES
from fairseq_command_cures import COMMAND_CURES
from fairseq_data_cures import DATA_CURES
from fairseq_library_cures import LIBRARY_CURES
from fairseq_loading_cures import LOADING_CURES
from fairseq_run_cures import RUN_CURES
from fairseq_safety_cures import REWRITINGS, SAFETY_CURES
from fairseq_speed_cures import SPEED_CURES
from fairseq_text_cures import TEXT_CURES, TEXT_REWRITINGS
from fairseq_waiting_cures import WAITING_CURES

VERSION = "0.12.2+fastweights.9"

BUILD_REQUIREMENTS = ("setuptools==80.9.0", "cython==3.1.4", "numpy==2.2.6")
"""What builds the wheel, pinned so that next year's wheel is this year's. An extension that was compiled against NumPy
2 also runs with NumPy 1; the converse does not hold."""

ADDED = {
    "fairseq_archives.py": "archives.py",
    "fairseq_bands.py": "modules/bands.py",
    "fairseq_binarised_data.py": "binarised_data.py",
    "fairseq_checkpoint_loader.py": "checkpoint_loader.py",
    "fairseq_checkpoint_writer.py": "checkpoint_writer.py",
    "fairseq_data_files.py": "data_files.py",
    "fairseq_file_chunks.py": "file_chunker_utils.py",
    "fairseq_fully_sharded.py": "distributed/fully_sharded_data_parallel.py",
    "fairseq_host_copies.py": "host_copies.py",
    "fairseq_late_values.py": "logging/late_values.py",
    "fairseq_many_tensors.py": "many_tensors.py",
    "fairseq_models_of_checkpoints.py": "models_of_checkpoints.py",
    "fairseq_one_line.py": "../fairseq_cli/__init__.py",
    "fairseq_settings.py": "settings.py",
    "fairseq_whole_folders.py": "whole_folders.py",
    "../fairseq_fastweights/bounded_loading.py": "bounded_loading.py",
    "../fairseq_fastweights/checkpoint_updates.py": "checkpoint_updates.py",
    "../fairseq_fastweights/digests.py": "digests.py",
    "../fairseq_fastweights/integrity.py": "integrity.py",
    "../fairseq_fastweights/model_sizes.py": "model_sizes.py",
    "../fairseq_fastweights/text_files.py": "text_files.py",
}
"""Files, from this one's folder, and their names in fairseq."""


class UnexpectedSourceError(Exception):
    """A file of fairseq is not what its cure expects; nothing may be built from this source."""


class Edit(NamedTuple):
    """In `file`, relative to the root of the source, `old`, which must occur exactly once, becomes `new`.

    `file` may be a pattern, which some file must match; FOLDER in `new` is the name of a file's folder.
    """

    file: str
    old: str
    new: str

    def apply(self, root: Path, cure: str) -> None:
        for path in sorted(root.glob(self.file)) or [root / self.file]:
            text = path.read_text(encoding="utf-8") if path.is_file() else ""
            if text.count(self.old) != 1:
                found = f"finds it {text.count(self.old)} times; is this the source of fairseq 0.12.2?"
                file = path.relative_to(root).as_posix()
                raise UnexpectedSourceError(f"{file}: {cure} expects {self.old.strip()!r} once and {found}")
            path.write_text(text.replace(self.old, self.new.replace("FOLDER", path.parent.name)), encoding="utf-8")


def _factory(file: str, field: str, config: str, default: str = "{}()") -> Edit:
    start = f"\n    {field}: {config} = "
    return Edit(file, f"{start}{default.format(config)}\n", f"{start}field(default_factory={config})\n")


_CONFIGS = "fairseq/dataclass/configs.py"
_TRANSFORMER = "fairseq/models/transformer/transformer_config.py"
_INITIALIZE = "fairseq/dataclass/initialize.py"
_CHECKPOINTS = "fairseq/checkpoint_utils.py"
_NGRAMS = "fairseq/ngram_repeat_block.py"
_MASK = "                encoder_padding_mask if encoder_padding_mask is not None else attn_mask,\n"

_BY_SUBJECT = (
    CHECKPOINT_CURES,
    COMMAND_CURES,
    DATA_CURES,
    LIBRARY_CURES,
    LOADING_CURES,
    RUN_CURES,
    SAFETY_CURES,
    SPEED_CURES,
    TEXT_CURES,
    WAITING_CURES,
)

CURES: dict[str, list[Edit]] = {
    # fairseq pins omegaconf 2.0, whose metadata pip >= 24.1 rejects, and hydra-core 1.0, which Python >= 3.11 cannot
    # import. It works with the releases named here.
    "living_hydra": [
        Edit("setup.py", '"hydra-core>=1.0.7,<1.1"', '"hydra-core>=1.3,<1.4"'),
        Edit("setup.py", '"omegaconf<2.1"', '"omegaconf>=2.3,<2.4"'),
    ],
    # Text never uses torchaudio, and one that was not built for the installed torch cannot be loaded.
    "no_torchaudio": [Edit("setup.py", '            "torchaudio>=0.8.0",\n', "")],
    # Python >= 3.11 refuses a field whose default is an unhashable object, which all instances would share.
    "default_factories": [
        *(
            _factory(_CONFIGS, field, f"{config}Config")
            for field, config in (
                *(("common", "Common"), ("common_eval", "CommonEval"), ("dataset", "Dataset"), ("ema", "EMA")),
                *(("distributed_training", "DistributedTraining"), ("optimization", "Optimization")),
                *(("checkpoint", "Checkpoint"), ("bmuf", "FairseqBMUF"), ("generation", "Generation")),
                *(("eval_lm", "EvalLM"), ("interactive", "Interactive")),
            )
        ),
        _factory(_TRANSFORMER, "encoder", "EncDecBaseConfig"),
        _factory(_TRANSFORMER, "decoder", "DecoderConfig"),
        _factory(_TRANSFORMER, "quant_noise", "QuantNoiseConfig", "field(default={}())"),
    ],
    # fairseq tells hydra the default of each config, which is missing where there is a factory.
    "defaults_from_factories": [
        Edit(_INITIALIZE, "\nimport logging\n", "\nimport logging\nfrom dataclasses import MISSING\n"),
        Edit(
            _INITIALIZE,
            "        v = FairseqConfig.__dataclass_fields__[k].default\n",
            "        field = FairseqConfig.__dataclass_fields__[k]\n"
            "        has_factory = field.default_factory is not MISSING\n"
            "        v = field.default_factory() if has_factory else field.default\n",
        ),
    ],
    # fairseq-hydra-train fills a model in with its dataclass's defaults before the function of a named architecture
    # runs, which keeps all that it finds: every architecture was trained as the model that it is one of. It runs first,
    # on what was set, also by other parts that the model's defaults stand for (task.max_target_positions).
    "hydra_architectures": [
        Edit(
            _INITIALIZE,
            "                name = ARCH_MODEL_NAME_REGISTRY.get(name, name)\n"
            "                dc = MODEL_DATACLASS_REGISTRY.get(name)\n",
            "                arch = name\n"
            "                name = ARCH_MODEL_NAME_REGISTRY.get(arch, arch)\n"
            "                dc = MODEL_DATACLASS_REGISTRY.get(name)\n"
            "                if dc is not None and arch != name:\n"
            "                    add_architecture(field_cfg, dc, ARCH_CONFIG_REGISTRY[arch])\n",
        ),
        Edit(
            _INITIALIZE,
            "    from fairseq.models import ARCH_MODEL_NAME_REGISTRY, MODEL_DATACLASS_REGISTRY\n",
            "    from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_NAME_REGISTRY\n"
            "    from fairseq.models import MODEL_DATACLASS_REGISTRY\n",
        ),
        Edit(_INITIALIZE, "\nimport logging\n", "\nimport logging\nfrom argparse import Namespace\n"),
        Edit(
            _INITIALIZE,
            "\n\ndef add_defaults(",
            '''

def add_architecture(cfg: DictConfig, dc, architecture) -> None:
    """Adds what a named architecture sets, where `cfg`, of the model, sets nothing itself"""

    from fairseq.dataclass.utils import merge_with_parent

    full = merge_with_parent(dc, cfg)
    given = Namespace()
    for k in dc.__dataclass_fields__:
        if k in cfg or OmegaConf.is_interpolation(full, k):
            v = OmegaConf.select(full, k, throw_on_resolution_failure=False)
            if v is not None:
                setattr(given, k, v)
    architecture(given)
    for k, v in vars(given).items():
        if k in dc.__dataclass_fields__ and k not in cfg:
            cfg[k] = v


def add_defaults(''',
        ),
        # False, which is no int to omegaconf.
        Edit("fairseq/models/transformer_lm.py", '"base_shuffle", False)', '"base_shuffle", 0)'),
    ],
    # The fused encoder layer of torch >= 2 asks what its mask is: 1 stands for padded keys, of shape (batch, time), and
    # 0 for an attention mask, of shape (time, time).
    "mask_type": [
        Edit(
            "fairseq/modules/transformer_layer.py",
            f"{_MASK}            )\n",
            f"{_MASK}"
            "                1\n"
            "                if encoder_padding_mask is not None\n"
            "                else (0 if attn_mask is not None else None),\n"
            "            )\n",
        )
    ],
    # `np.int`, `np.float` and `np.compat.long`, other names of Python's own types, are gone from NumPy 1.24 and 2.
    "builtin_numbers": [
        Edit("fairseq/data/data_utils.py", " np.int,\n", " int,\n"),
        Edit("fairseq/modules/dynamic_crf_layer.py", 'np.float("inf")', 'float("inf")'),
        Edit("fairseq/data/token_block_dataset.py", "np.compat.long", "int"),
        Edit("fairseq/data/language_pair_dataset.py", "np.compat.long", "int"),
    ],
    # Of several processes the first loads the checkpoint, by the safe loader, and sends the others a pickle of it with
    # fairseq's own classes, which torch >= 2.6 refuses to read. A process may trust another one of the same run.
    "broadcast_objects": [
        Edit(
            "fairseq/distributed/utils.py",
            'torch.load(buffer, map_location="cpu")\n',
            'torch.load(buffer, map_location="cpu", weights_only=False)\n',
        )
    ],
    # hydra >= 1.1 puts `model=transformer_lm/transformer_lm_gpt` into `model`, no longer into `model.transformer_lm`,
    # from which fairseq took the name of the model. Now the file says it.
    "named_models": [
        Edit("fairseq/config/model/*/*.yaml", "# @package _group_\n", "# @package _group_\n_name: FOLDER\n")
    ],
    # --no-repeat-ngram-size looks for what comes after the last n - 1 tokens, and took them from the end of a buffer
    # that is not full yet: nothing was forbidden. Now two things stay allowed: a token that is all there is to choose
    # (of a prefix, the end at the maximal length), and for n = 1 the end, which also stands at the beginning.
    "repeated_ngrams": [
        Edit(_NGRAMS, "-(self.no_repeat_ngram_size - 1) :\n", "check_start_pos : step + 1\n"),
        Edit(
            _NGRAMS,
            "for i in range(check_start_pos):\n",
            "for i in range(1 if self.no_repeat_ngram_size == 1 else 0, check_start_pos):\n",
        ),
        Edit(
            _NGRAMS,
            "        for bbsz_idx in range(bsz * beam_size):\n            lprobs[bbsz_idx][\n",
            "        choices: List[int] = (lprobs > -math.inf).sum(dim=1).tolist()\n"
            "        for bbsz_idx in range(bsz * beam_size):\n"
            "            if choices[bbsz_idx] == 1:\n"
            "                continue\n"
            "            lprobs[bbsz_idx][\n",
        ),
    ],
    # sacrebleu >= 2 takes lists of sentences and no open files.
    "scores_from_lists": [
        Edit("fairseq_cli/score.py", "corpus_bleu(fdsys, [fdref])", "corpus_bleu(list(fdsys), [list(fdref)])")
    ],
    # --bf16 implies --tpu, and every other machine fails for want of a TPU's library.
    "bfloat16_without_tpu": [Edit("fairseq/options.py", "    if args.bf16:\n        args.tpu = True\n", "")],
    # The optimizer of --fp16 and --bf16 asks CUDA where its parameters are, which fails on a CPU.
    "half_precision_without_cuda": [
        Edit("fairseq/optim/fp16_optimizer.py", "[torch.cuda.current_device()]", "[params[0].device.index]")
    ],
    **{name: [Edit(*edit) for edit in edits] for cures in _BY_SUBJECT for name, edits in cures.items()},
    # A changed fairseq must not pass for the released one. It requires what it imports, and is built by what was tried.
    "honest_metadata": [
        Edit("fairseq/version.txt", "0.12.2", f"{VERSION}\n"),
        Edit("setup.py", '            "cffi",\n            "cython",\n', ""),
        # In releases before, the safe loader runs code (CVE-2025-32434).
        Edit("setup.py", '            "torch",\n', '            "isal",\n            "torch>=2.6",\n'),
        Edit("setup.py", "  install_requires=[\n", '  python_requires=">=3.10",\n        install_requires=[\n'),
        Edit("pyproject.toml", '"setuptools", "wheel", "cython"', json.dumps(BUILD_REQUIREMENTS)[1:-1]),
    ],
}


def rewrite(root: Path) -> None:
    """Changes all files in which a rewriting finds something; there must be one for each."""
    paths = [path for folder in ("fairseq", "fairseq_cli") for path in sorted((root / folder).rglob("*.py"))]
    for found, changed in (REWRITINGS | TEXT_REWRITINGS).items():
        before = {path: path.read_text(encoding="utf-8") for path in paths}
        after = {path: new for path, text in before.items() if (new := changed(text)) != text}
        if not after:
            raise UnexpectedSourceError(f"fairseq/: no file {found}; is this the source of fairseq 0.12.2?")
        for path, text in after.items():
            path.write_text(text, encoding="utf-8")


def apply_cures(root: Path) -> None:
    """Cures the unpacked source in `root`; raises `UnexpectedSourceError` if it is another one."""
    for number, (name, edits) in enumerate(CURES.items(), start=1):
        for edit in edits:
            edit.apply(root, f"cure {number} ({name})")
    rewrite(root)
    for file, added in ADDED.items():
        shutil.copyfile(Path(__file__).parent / file, root / "fairseq" / added)
