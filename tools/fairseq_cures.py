"""What keeps fairseq 0.12.2 from running on today's Python and PyTorch, and a cure for each.

A cure is a function that changes an unpacked source; its docstring says why it must. Each one
checks that it finds what it expects, and raises `UnexpectedSourceError` otherwise: a cure that
silently did nothing would be noticed long after, in somebody's training run.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

VERSION = "0.12.2+fastweights.3"

BUILD_REQUIREMENTS = ("setuptools==80.9.0", "cython==3.1.4", "numpy==2.2.6")
"""What builds the wheel, pinned so that next year's wheel is this year's. An extension that was
compiled against NumPy 2 also runs with NumPy 1; the converse does not hold."""

CHECKPOINT_LOADER = Path(__file__).with_name("fairseq_checkpoint_loader.py")


class UnexpectedSourceError(Exception):
    """A file of fairseq is not what its cure expects; nothing may be built from this source."""


class FairseqSource:
    """An unpacked fairseq sdist, and the cure that is at work on it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.cure = "no cure"

    def read(self, file: str) -> str:
        """The text of `file`, which is relative to the root of the source."""
        try:
            return (self.root / file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UnexpectedSourceError(f"{file}: {self.cure} cannot read it: {error}") from error

    def write(self, file: str, text: str) -> None:
        """Makes `text` the content of `file`."""
        (self.root / file).write_text(text, encoding="utf-8")

    def replace(self, file: str, old: str, new: str) -> None:
        """Replaces `old`, which must occur in `file` exactly once, by `new`."""
        text = self.read(file)
        if text.count(old) != 1:
            raise UnexpectedSourceError(
                f"{file}: {self.cure} expects {old.strip()!r} once and finds it "
                f"{text.count(old)} times; is this the source of fairseq 0.12.2?"
            )
        self.write(file, text.replace(old, new))


def living_hydra(source: FairseqSource) -> None:
    """fairseq pins omegaconf 2.0, whose metadata pip >= 24.1 rejects, and hydra-core 1.0, which
    Python >= 3.11 cannot import. It works with the releases named here."""
    source.replace("setup.py", '"hydra-core>=1.0.7,<1.1"', '"hydra-core>=1.3,<1.4"')
    source.replace("setup.py", '"omegaconf<2.1"', '"omegaconf>=2.3,<2.4"')


def no_torchaudio(source: FairseqSource) -> None:
    """Text never uses torchaudio, and one that was not built for the installed torch cannot be
    loaded."""
    source.replace("setup.py", '            "torchaudio>=0.8.0",\n', "")


def default_factories(source: FairseqSource) -> None:
    """Python >= 3.11 refuses a dataclass field whose default is an unhashable object, as every
    config object is, because all instances would share it. A factory makes one for each."""
    for field, config in (
        ("common", "CommonConfig"),
        ("common_eval", "CommonEvalConfig"),
        ("distributed_training", "DistributedTrainingConfig"),
        ("dataset", "DatasetConfig"),
        ("optimization", "OptimizationConfig"),
        ("checkpoint", "CheckpointConfig"),
        ("bmuf", "FairseqBMUFConfig"),
        ("generation", "GenerationConfig"),
        ("eval_lm", "EvalLMConfig"),
        ("interactive", "InteractiveConfig"),
        ("ema", "EMAConfig"),
    ):
        _use_factory(source, "fairseq/dataclass/configs.py", field, config, f"{config}()")
    file = "fairseq/models/transformer/transformer_config.py"
    _use_factory(source, file, "encoder", "EncDecBaseConfig", "EncDecBaseConfig()")
    _use_factory(source, file, "decoder", "DecoderConfig", "DecoderConfig()")
    _use_factory(source, file, "quant_noise", "QuantNoiseConfig", "field(default=QuantNoiseConfig())")


def _use_factory(source: FairseqSource, file: str, field: str, config: str, default: str) -> None:
    start = f"\n    {field}: {config} = "
    source.replace(file, f"{start}{default}\n", f"{start}field(default_factory={config})\n")


def defaults_from_factories(source: FairseqSource) -> None:
    """fairseq tells hydra the default of each config, which is missing where there is a factory."""
    file = "fairseq/dataclass/initialize.py"
    source.replace(file, "\nimport logging\n", "\nimport logging\nfrom dataclasses import MISSING\n")
    source.replace(
        file,
        "        v = FairseqConfig.__dataclass_fields__[k].default\n",
        "        field = FairseqConfig.__dataclass_fields__[k]\n"
        "        has_factory = field.default_factory is not MISSING\n"
        "        v = field.default_factory() if has_factory else field.default\n",
    )


def hydra_architectures(source: FairseqSource) -> None:
    """fairseq-hydra-train fills a model in with its dataclass's defaults before the function of a named
    architecture runs, which keeps all that it finds: every architecture was trained as the model
    that it is one of. It runs first, on what was set; this includes other parts' settings that the
    model's defaults stand for (task.max_target_positions)."""
    file = "fairseq/dataclass/initialize.py"
    source.replace(
        file,
        "                name = ARCH_MODEL_NAME_REGISTRY.get(name, name)\n"
        "                dc = MODEL_DATACLASS_REGISTRY.get(name)\n",
        "                arch = name\n"
        "                name = ARCH_MODEL_NAME_REGISTRY.get(arch, arch)\n"
        "                dc = MODEL_DATACLASS_REGISTRY.get(name)\n"
        "                if dc is not None and arch != name:\n"
        "                    add_architecture(field_cfg, dc, ARCH_CONFIG_REGISTRY[arch])\n",
    )
    source.replace(
        file,
        "    from fairseq.models import ARCH_MODEL_NAME_REGISTRY, MODEL_DATACLASS_REGISTRY\n",
        "    from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_NAME_REGISTRY\n"
        "    from fairseq.models import MODEL_DATACLASS_REGISTRY\n",
    )
    source.replace(file, "\nimport logging\n", "\nimport logging\nfrom argparse import Namespace\n")
    source.replace(
        file,
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
    )
    # False, which is no int to omegaconf.
    source.replace("fairseq/models/transformer_lm.py", '"base_shuffle", False)', '"base_shuffle", 0)')


def safe_checkpoints(source: FairseqSource) -> None:
    """torch >= 2.6 refuses the `argparse.Namespace` in checkpoints of fairseq, and torch < 2.6 runs
    any code that a checkpoint holds. A loader that allows what such checkpoints need, and no more,
    serves both."""
    file = "fairseq/checkpoint_utils.py"
    source.replace(
        file,
        "\nfrom fairseq.data import data_utils\n",
        "\nfrom fairseq.checkpoint_loader import load_checkpoint_file\nfrom fairseq.data import data_utils\n",
    )
    source.replace(
        file,
        'torch.load(f, map_location=torch.device("cpu"))',
        "load_checkpoint_file(f, path)",
    )
    source.replace(
        file,
        """torch.load(
            f,
            map_location=(
                lambda s, _: torch.serialization.default_restore_location(s, "cpu")
            ),
        )""",
        "load_checkpoint_file(f, fpath)",
    )
    shutil.copyfile(CHECKPOINT_LOADER, source.root / "fairseq/checkpoint_loader.py")


def whole_copies(source: FairseqSource) -> None:
    """A checkpoint is written beside the last one and renamed, but its copies, checkpoint_last.pt
    mostly, are written over the last ones: a training that is killed meanwhile leaves part of a
    file, from which it cannot go on. A copy is written beside and renamed, too."""
    file = "fairseq/checkpoint_utils.py"
    source.replace(
        file,
        """                assert PathManager.copy(
                    checkpoints[0], cp, overwrite=True
                ), f"Failed to copy {checkpoints[0]} to {cp}"
""",
        """                renames = PathManager.supports_rename(cp)
                copy = cp + ".tmp" if renames else cp
                assert PathManager.copy(
                    checkpoints[0], copy, overwrite=True
                ), f"Failed to copy {checkpoints[0]} to {copy}"
                if renames:
                    PathManager.rename(copy, cp)
""",
    )


def mask_type(source: FairseqSource) -> None:
    """The fused encoder layer of torch >= 2 asks what its mask is: 1 stands for padded keys, of
    shape (batch, time), and 0 for an attention mask, of shape (time, time)."""
    mask = "encoder_padding_mask if encoder_padding_mask is not None else attn_mask,\n"
    source.replace(
        "fairseq/modules/transformer_layer.py",
        f"                {mask}            )\n",
        f"                {mask}"
        "                1\n"
        "                if encoder_padding_mask is not None\n"
        "                else (0 if attn_mask is not None else None),\n"
        "            )\n",
    )


def builtin_numbers(source: FairseqSource) -> None:
    """`np.int`, `np.float` and `np.compat` are gone from NumPy 1.24 and 2; the first two, and
    `np.compat.long`, were other names of Python's own types."""
    source.replace("fairseq/data/data_utils.py", " np.int,\n", " int,\n")
    source.replace("fairseq/modules/dynamic_crf_layer.py", 'np.float("inf")', 'float("inf")')
    for file in ("fairseq/data/token_block_dataset.py", "fairseq/data/language_pair_dataset.py"):
        source.replace(file, "np.compat.long", "int")


def broadcast_objects(source: FairseqSource) -> None:
    """Of several processes the first loads the checkpoint, by the safe loader, and sends the others
    a pickle of it with fairseq's own classes, which torch >= 2.6 refuses to read. A process may
    trust another one of the same run."""
    load = 'torch.load(buffer, map_location="cpu"'
    source.replace("fairseq/distributed/utils.py", f"{load})\n", f"{load}, weights_only=False)\n")


def named_models(source: FairseqSource) -> None:
    """hydra >= 1.1 puts `model=transformer_lm/transformer_lm_gpt` into `model`, no longer into
    `model.transformer_lm`, from which fairseq took the name of the model. Now the file says it."""
    files = sorted(source.root.glob("fairseq/config/model/*/*.yaml"))
    if not files:
        raise UnexpectedSourceError(f"fairseq/config/model: {source.cure} finds no */*.yaml in it")
    for path in files:
        file = path.relative_to(source.root).as_posix()
        header = "# @package _group_\n"
        source.replace(file, header, f"{header}_name: {path.parent.name}\n")


def repeated_ngrams(source: FairseqSource) -> None:
    """--no-repeat-ngram-size looks for what comes after the last n - 1 tokens, and took them from the
    end of a buffer that is not full yet: nothing was forbidden. Now that something is, two things
    stay allowed: a token that is all there is to choose (of a prefix, the end at the maximal length),
    and for n = 1 the end of the sentence, which also stands at the beginning."""
    file = "fairseq/ngram_repeat_block.py"
    source.replace(file, "-(self.no_repeat_ngram_size - 1) :\n", "check_start_pos : step + 1\n")
    source.replace(
        file,
        "for i in range(check_start_pos):\n",
        "for i in range(1 if self.no_repeat_ngram_size == 1 else 0, check_start_pos):\n",
    )
    source.replace(
        file,
        "        for bbsz_idx in range(bsz * beam_size):\n            lprobs[bbsz_idx][\n",
        "        choices: List[int] = (lprobs > -math.inf).sum(dim=1).tolist()\n"
        "        for bbsz_idx in range(bsz * beam_size):\n"
        "            if choices[bbsz_idx] == 1:\n"
        "                continue\n"
        "            lprobs[bbsz_idx][\n",
    )


def scores_from_lists(source: FairseqSource) -> None:
    """sacrebleu >= 2 takes lists of sentences and no open files."""
    source.replace(
        "fairseq_cli/score.py",
        "corpus_bleu(fdsys, [fdref])",
        "corpus_bleu(list(fdsys), [list(fdref)])",
    )


def bfloat16_without_tpu(source: FairseqSource) -> None:
    """--bf16 implies --tpu, and every other machine fails for want of a TPU's library."""
    source.replace("fairseq/options.py", "    if args.bf16:\n        args.tpu = True\n", "")


def half_precision_without_cuda(source: FairseqSource) -> None:
    """The optimizer of --fp16 and --bf16 asks CUDA for the device that its parameters are on, which
    fails where they are on the CPU; they know it themselves."""
    source.replace(
        "fairseq/optim/fp16_optimizer.py",
        "devices = [torch.cuda.current_device()]",
        "devices = [params[0].device.index]",
    )


def honest_metadata(source: FairseqSource) -> None:
    """A changed fairseq must not pass for the released one. It requires what it imports (cffi and
    cython it does not), and it is built by what was tried."""
    if source.read("fairseq/version.txt").strip() != "0.12.2":
        raise UnexpectedSourceError(f"fairseq/version.txt: {source.cure} expects 0.12.2 in it")
    source.write("fairseq/version.txt", VERSION + "\n")
    source.replace("setup.py", '            "cffi",\n            "cython",\n', "")
    source.replace("setup.py", '            "torch",\n', '            "torch>=2.4",\n')
    source.replace(
        "setup.py",
        "        install_requires=[\n",
        '        python_requires=">=3.10",\n        install_requires=[\n',
    )
    pins = ", ".join(f'"{requirement}"' for requirement in BUILD_REQUIREMENTS)
    source.replace("pyproject.toml", '"setuptools", "wheel", "cython"', pins)


CURES: tuple[Callable[[FairseqSource], None], ...] = (
    living_hydra,
    no_torchaudio,
    default_factories,
    defaults_from_factories,
    hydra_architectures,
    safe_checkpoints,
    whole_copies,
    mask_type,
    builtin_numbers,
    broadcast_objects,
    named_models,
    repeated_ngrams,
    scores_from_lists,
    bfloat16_without_tpu,
    half_precision_without_cuda,
    honest_metadata,
)


def apply_cures(root: Path) -> None:
    """Cures the unpacked source in `root`; raises `UnexpectedSourceError` if it is another one."""
    source = FairseqSource(root)
    for number, cure in enumerate(CURES, start=1):
        source.cure = f"cure {number} ({cure.__name__})"
        cure(source)
