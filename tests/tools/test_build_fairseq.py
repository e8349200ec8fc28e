"""fairseq is built from the source that the cures were written for, or not at all."""

import argparse
import pickle
import re
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import build_fairseq
import fairseq_cures
import numpy as np
import pytest
import torch

# The lines that the cures look for, and nothing else.
SOURCE = {
    "setup.py": """
        install_requires=[
            "cffi",
            "cython",
            "hydra-core>=1.0.7,<1.1",
            "omegaconf<2.1",
            "torch",
            "torchaudio>=0.8.0",
        ],
""",
    "pyproject.toml": 'requires = ["setuptools", "wheel", "cython"]\n',
    "fairseq/version.txt": "0.12.2",
    "fairseq/dataclass/configs.py": """
    common: CommonConfig = CommonConfig()
    common_eval: CommonEvalConfig = CommonEvalConfig()
    distributed_training: DistributedTrainingConfig = DistributedTrainingConfig()
    dataset: DatasetConfig = DatasetConfig()
    optimization: OptimizationConfig = OptimizationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    bmuf: FairseqBMUFConfig = FairseqBMUFConfig()
    generation: GenerationConfig = GenerationConfig()
    eval_lm: EvalLMConfig = EvalLMConfig()
    interactive: InteractiveConfig = InteractiveConfig()
    ema: EMAConfig = EMAConfig()
""",
    "fairseq/models/transformer/transformer_config.py": """
    encoder: EncDecBaseConfig = EncDecBaseConfig()
    decoder: DecoderConfig = DecoderConfig()
    quant_noise: QuantNoiseConfig = field(default=QuantNoiseConfig())
""",
    "fairseq/dataclass/initialize.py": """
import logging
        v = FairseqConfig.__dataclass_fields__[k].default


def add_defaults(cfg: DictConfig) -> None:
    from fairseq.models import ARCH_MODEL_NAME_REGISTRY, MODEL_DATACLASS_REGISTRY
                name = ARCH_MODEL_NAME_REGISTRY.get(name, name)
                dc = MODEL_DATACLASS_REGISTRY.get(name)
""",
    "fairseq/models/transformer_lm.py": 'args.base_shuffle = safe_getattr(args, "base_shuffle", False)\n',
    "fairseq/ngram_repeat_block.py": """
                    -(self.no_repeat_ngram_size - 1) :
                ]
                for i in range(check_start_pos):
        for bbsz_idx in range(bsz * beam_size):
            lprobs[bbsz_idx][
""",
    "fairseq/checkpoint_utils.py": """
from fairseq.data import data_utils
        state = torch.load(f, map_location=torch.device("cpu"))
        new_state = torch.load(
            f,
            map_location=(
                lambda s, _: torch.serialization.default_restore_location(s, "cpu")
            ),
        )
                assert PathManager.copy(
                    checkpoints[0], cp, overwrite=True
                ), f"Failed to copy {checkpoints[0]} to {cp}"
""",
    "fairseq/modules/transformer_layer.py": """
                encoder_padding_mask if encoder_padding_mask is not None else attn_mask,
            )
""",
    "fairseq/data/data_utils.py": "                    np.int,\n",
    "fairseq/data/token_block_dataset.py": "dtype=np.compat.long\n",
    "fairseq/data/language_pair_dataset.py": "otypes=[np.compat.long]\n",
    "fairseq/modules/dynamic_crf_layer.py": 'np.float("inf")\n',
    "fairseq/distributed/utils.py": '        obj = torch.load(buffer, map_location="cpu")\n',
    "fairseq/config/model/transformer_lm/gpt.yaml": "# @package _group_\ndropout: 0.1\n",
    "fairseq/options.py": "    if args.bf16:\n        args.tpu = True\n",
    "fairseq/optim/fp16_optimizer.py": "devices = [torch.cuda.current_device()]\n",
    "fairseq_cli/score.py": "sacrebleu.corpus_bleu(fdsys, [fdref])\n",
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder with the lines of fairseq that are cured."""
    root = tmp_path / "fairseq-0.12.2"
    for file, text in SOURCE.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(text)
    return root


class TestCures:
    def test_cure_the_expected_source(self, source: Path) -> None:
        fairseq_cures.apply_cures(source)
        cured = {file: (source / file).read_text() for file in SOURCE}
        assert all(cured[file] != text for file, text in SOURCE.items())
        everything = "".join(cured.values())
        for gone in ("torchaudio", "Config()", "np.int,", "np.float", "np.compat", "cffi"):
            assert gone not in everything
        assert "torch.load" not in cured["fairseq/checkpoint_utils.py"]
        assert "_name: transformer_lm\n" in cured["fairseq/config/model/transformer_lm/gpt.yaml"]
        assert (source / "fairseq/checkpoint_loader.py").is_file()

    @pytest.mark.parametrize(
        ("cure", "file"),
        [
            ("living_hydra", "setup.py"),
            ("no_torchaudio", "setup.py"),
            ("default_factories", "fairseq/dataclass/configs.py"),
            ("default_factories", "fairseq/models/transformer/transformer_config.py"),
            ("defaults_from_factories", "fairseq/dataclass/initialize.py"),
            ("hydra_architectures", "fairseq/dataclass/initialize.py"),
            ("hydra_architectures", "fairseq/models/transformer_lm.py"),
            ("safe_checkpoints", "fairseq/checkpoint_utils.py"),
            ("whole_copies", "fairseq/checkpoint_utils.py"),
            ("mask_type", "fairseq/modules/transformer_layer.py"),
            ("builtin_numbers", "fairseq/data/data_utils.py"),
            ("builtin_numbers", "fairseq/data/token_block_dataset.py"),
            ("builtin_numbers", "fairseq/data/language_pair_dataset.py"),
            ("builtin_numbers", "fairseq/modules/dynamic_crf_layer.py"),
            ("broadcast_objects", "fairseq/distributed/utils.py"),
            ("named_models", "fairseq/config/model/transformer_lm/gpt.yaml"),
            ("repeated_ngrams", "fairseq/ngram_repeat_block.py"),
            ("scores_from_lists", "fairseq_cli/score.py"),
            ("bfloat16_without_tpu", "fairseq/options.py"),
            ("half_precision_without_cuda", "fairseq/optim/fp16_optimizer.py"),
            ("honest_metadata", "fairseq/version.txt"),
            ("honest_metadata", "pyproject.toml"),
        ],
    )
    @pytest.mark.parametrize("change", ["other", "missing"])
    def test_name_an_unexpected_file_and_the_cure(self, source: Path, cure: str, file: str, change: str) -> None:
        if change == "other":
            (source / file).write_text("something else\n")
        else:
            (source / file).unlink()
        curing = fairseq_cures.FairseqSource(source)
        curing.cure = f"the cure {cure}"
        with pytest.raises(fairseq_cures.UnexpectedSourceError) as error:
            getattr(fairseq_cures, cure)(curing)
        folder, _, _ = file.partition("/transformer_lm/")  # all there is to name if it is empty
        assert str(error.value).startswith(folder) and f"the cure {cure}" in str(error.value)

    def test_refuse_a_source_that_is_cured_already(self, source: Path) -> None:
        fairseq_cures.apply_cures(source)
        with pytest.raises(fairseq_cures.UnexpectedSourceError, match=r"cure 1 \(living_hydra\)"):
            fairseq_cures.apply_cures(source)


class TestBuild:
    @pytest.fixture
    def calls(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
        """What pip would have been asked for, in an environment without fairseq."""
        calls: list[tuple[str, ...]] = []
        monkeypatch.setattr(build_fairseq, "pip", lambda *args, **kwargs: calls.append(args))
        monkeypatch.setattr(build_fairseq, "installed_version", lambda: None)
        return calls

    def test_refuses_an_sdist_with_another_hash(
        self, calls: list[tuple[str, ...]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        sdist = tmp_path / "fairseq-0.12.2.tar.gz"
        sdist.write_bytes(b"not the sdist")
        assert build_fairseq.main(["--sdist", str(sdist)]) == 1
        message = capsys.readouterr().err
        assert str(sdist) in message and "nothing was installed" in message
        assert not calls

    def test_installs_nothing_from_an_unexpected_source(
        self,
        calls: list[tuple[str, ...]],
        source: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        (source / "fairseq/data/data_utils.py").write_text("another release\n")
        monkeypatch.setattr(build_fairseq, "check_hash", lambda sdist: None)
        monkeypatch.setattr(build_fairseq, "unpack", lambda sdist, folder: source)
        assert build_fairseq.main(["--sdist", __file__]) == 1
        message = capsys.readouterr().err
        assert "fairseq/data/data_utils.py" in message and "builtin_numbers" in message
        assert not calls

    def test_names_a_file_that_is_not_there(
        self, calls: list[tuple[str, ...]], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert build_fairseq.main(["--constraint", "no/such/file.txt"]) == 1
        assert "--constraint no/such/file.txt" in capsys.readouterr().err
        assert not calls

    @pytest.fixture
    def build(self, source: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
        """An environment with a `version` of fairseq, which has a `failure` or works; what pip is asked for there."""
        environment = SimpleNamespace(version=None, failure=None, calls=[])

        def pip(what: str, *arguments: str, doing: str) -> None:
            environment.calls.append(what)
            if what == "wheel":
                folder = Path(arguments[arguments.index("--wheel-dir") + 1])
                folder.mkdir()
                (folder / "fairseq-0.12.2.whl").touch()
            else:
                environment.version = {"install": fairseq_cures.VERSION, "uninstall": None}[what]

        monkeypatch.setattr(build_fairseq, "pip", pip)
        monkeypatch.setattr(build_fairseq, "installed_version", lambda: environment.version)
        monkeypatch.setattr(build_fairseq, "import_failure", lambda: environment.failure)
        monkeypatch.setattr(build_fairseq, "check_hash", lambda sdist: None)
        monkeypatch.setattr(build_fairseq, "unpack", lambda sdist, folder: source)
        return environment

    @pytest.mark.parametrize(
        ("version", "calls"),
        [(None, ["wheel", "install"]), (fairseq_cures.VERSION, ["wheel"]), ("1.0.0a0", ["wheel"])],
    )
    def test_makes_the_wheel_that_was_asked_for_beside_a_fairseq_that_works(
        self, build: SimpleNamespace, version: str | None, calls: list[str], tmp_path: Path
    ) -> None:
        build.version = version
        assert build_fairseq.main(["--sdist", __file__, "--wheel-dir", str(tmp_path / "wheels")]) == 0
        assert build.calls == calls and build.version == (version or fairseq_cures.VERSION)
        assert [path.name for path in (tmp_path / "wheels").iterdir()] == ["fairseq-0.12.2.whl"]

    @pytest.mark.parametrize("option", ["--sdist", "--constraint"])
    def test_names_a_file_that_is_not_there_beside_a_fairseq_that_works(
        self, build: SimpleNamespace, option: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        build.version = fairseq_cures.VERSION
        assert build_fairseq.main([option, "no/such/file"]) == 1
        assert f"{option} no/such/file" in capsys.readouterr().err and not build.calls

    @pytest.mark.parametrize(
        ("version", "says"),
        [(None, "nothing was installed"), ("0.12.2", "fairseq 0.12.2, which was there, is removed")],
    )
    def test_says_what_is_left_where_the_new_one_cannot_be_imported(
        self, build: SimpleNamespace, version: str | None, says: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        build.version, build.failure = version, "ImportError: libtorch"
        assert build_fairseq.main(["--sdist", __file__]) == 1
        assert capsys.readouterr().err.endswith(f"cannot be imported: ImportError: libtorch; {says}\n")
        assert build.version is None

    @pytest.mark.parametrize(
        ("version", "failure", "must_install", "says"),
        [
            (None, None, True, ""),
            (fairseq_cures.VERSION, None, False, "nothing to install"),
            (fairseq_cures.VERSION, "ImportError: libtorch", True, "ImportError: libtorch"),
            ("0.12.2", "ValueError: mutable default", True, "mutable default"),
            ("1.0.0a0", None, False, "left as it is"),
            ("0.12.3", None, False, "left as it is"),
        ],
    )
    def test_leaves_a_fairseq_that_works_alone(
        self,
        version: str | None,
        failure: str | None,
        must_install: bool,
        says: str,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setattr(build_fairseq, "installed_version", lambda: version)
        monkeypatch.setattr(build_fairseq, "import_failure", lambda: failure)
        assert build_fairseq.must_install() is must_install
        assert says in capsys.readouterr().out

    def test_does_not_replace_an_old_fairseq_unasked(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(build_fairseq, "installed_version", lambda: "0.10.2")
        monkeypatch.setattr(build_fairseq, "import_failure", lambda: None)
        assert build_fairseq.main([]) == 1
        assert "0.10.2" in capsys.readouterr().err

    @pytest.mark.parametrize("version", [(3, 9), (3, 14)])
    def test_names_a_python_that_will_not_do(self, version: tuple[int, int]) -> None:
        with pytest.raises(build_fairseq.BuildError, match=rf"Python 3\.{version[1]}"):
            build_fairseq.check_python(version)

    @pytest.mark.slow
    def test_a_second_run_finds_the_work_done(self, our_fairseq: None) -> None:
        command = [sys.executable, build_fairseq.__file__]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        assert "nothing to install" in result.stdout


class Hostile:
    """Unpickling it writes the file `path`; a hostile checkpoint would do something worse."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return open, (str(self.path), "w")


class TestCheckpointLoader:
    """Through the function by which fairseq trains on, evaluates and generates."""

    @pytest.fixture
    def load(self, our_fairseq: None):
        from fairseq import checkpoint_utils

        return checkpoint_utils.load_checkpoint_to_cpu

    @staticmethod
    def checkpoint(**entries: object) -> dict[str, object]:
        history = [
            {
                "criterion_name": "CrossEntropyCriterion",
                "optimizer_name": "FairseqNAG",
                "lr_scheduler_state": {"best": None},
                "num_updates": 7,
            }
        ]
        return {
            "args": None,
            "model": OrderedDict(weight=torch.arange(3.0)),
            "optimizer_history": history,
            "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 7}},
            **entries,
        }

    def test_loads_the_options_of_an_old_checkpoint(self, load, tmp_path: Path) -> None:
        path = tmp_path / "old.pt"
        args = argparse.Namespace(task="language_modeling", arch="transformer_lm", lr=0.25, data=["corpus"])
        torch.save(self.checkpoint(args=args), path)
        state = load(str(path), arg_overrides={"data": "elsewhere"})
        assert state["args"].arch == "transformer_lm" and state["args"].lr == [0.25]
        assert state["args"].data == "elsewhere"
        assert state["model"]["weight"].tolist() == [0, 1, 2]

    def test_loads_the_format_before_torch_1_6(self, load, tmp_path: Path) -> None:
        path = tmp_path / "old.pt"
        torch.save(self.checkpoint(), path, _use_new_zipfile_serialization=False)
        assert load(str(path))["model"]["weight"].tolist() == [0, 1, 2]

    @staticmethod
    def renamed(path: Path, old: bytes, new: bytes) -> None:
        """What another release would have written: the same objects under their older names."""
        content = path.read_bytes()
        assert re.search(old, content)
        path.write_bytes(re.sub(old, new, content))

    def test_loads_the_meters_of_fairseq_0_8(self, load, tmp_path: Path) -> None:
        from fairseq.logging.meters import AverageMeter

        meter = AverageMeter()
        meter.update(1.5, n=2)
        path = tmp_path / "old.pt"
        state = self.checkpoint(extra_state={"train_iterator": {}, "train_meters": {"loss": meter}})
        torch.save(state, path, _use_new_zipfile_serialization=False)
        self.renamed(path, rb"fairseq\.logging\.meters\n", b"fairseq.meters\n")
        assert load(str(path))["extra_state"]["train_meters"]["loss"].count == 2

    @pytest.mark.parametrize("core", [b"numpy.core", b"numpy._core"])
    def test_loads_numpy_numbers_and_saves_them_again(self, load, core: bytes, tmp_path: Path) -> None:
        path, again = tmp_path / "bleu.pt", tmp_path / "again.pt"
        counts, big_endian = np.array([[3, 2], [1, 0]]), np.array([1.5], dtype=">f4")
        metrics = {"counts": counts, "big": big_endian, "loss": np.float64(2.5)}
        state = self.checkpoint(metrics=metrics)
        torch.save(state, path, _use_new_zipfile_serialization=False)
        self.renamed(path, rb"numpy\._?core\.multiarray\n", core + b".multiarray\n")
        loaded = load(str(path))["metrics"]
        for _ in range(2):
            assert isinstance(loaded["counts"], np.ndarray)
            assert loaded["counts"].tolist() == counts.tolist()
            assert loaded["counts"].dtype == counts.dtype
            assert loaded["big"].tolist() == [1.5]
            assert loaded["loss"] == 2.5
            torch.save(self.checkpoint(metrics=loaded), again)
            loaded = load(str(again))["metrics"]

    @pytest.mark.parametrize("zipped", [True, False])
    def test_does_not_run_what_a_hostile_checkpoint_asks_for(self, load, zipped: bool, tmp_path: Path) -> None:
        path, witness = tmp_path / "hostile.pt", tmp_path / "witness"
        state = self.checkpoint(args=Hostile(witness))
        torch.save(state, path, _use_new_zipfile_serialization=zipped)
        with pytest.raises(ValueError, match=r"hostile\.pt.* asks for .*open") as error:
            load(str(path))
        assert "weights_only" not in str(error.value)  # no advice to run it after all
        assert not witness.exists()

    def test_does_not_run_a_plain_pickle(self, load, tmp_path: Path) -> None:
        path, witness = tmp_path / "hostile.pt", tmp_path / "witness"
        path.write_bytes(pickle.dumps(Hostile(witness), protocol=2))
        with pytest.raises(ValueError, match=r"hostile\.pt"):
            load(str(path))
        assert not witness.exists()

    def test_refuses_an_array_of_objects(self, load, tmp_path: Path) -> None:
        path = tmp_path / "objects.pt"
        torch.save(self.checkpoint(metrics=np.array([{}, []], dtype=object)), path)
        with pytest.raises(ValueError, match=r"objects\.pt.*only numbers are allowed"):
            load(str(path))

    @pytest.mark.parametrize("keep", [0, 1, 10, 0.5, 0.99])
    def test_names_a_file_that_was_cut_short(self, load, keep: float, tmp_path: Path) -> None:
        path = tmp_path / "cut.pt"
        torch.save(self.checkpoint(), path)
        content = path.read_bytes()
        path.write_bytes(content[: int(keep * len(content)) if keep < 1 else int(keep)])
        with pytest.raises(ValueError, match=r"cut\.pt .*(empty|cut short)"):
            load(str(path))

    @pytest.mark.parametrize("content", [torch.zeros(2), {"weight": torch.zeros(2)}, [1, 2]])
    def test_names_a_file_of_something_else(self, load, content: object, tmp_path: Path) -> None:
        path = tmp_path / "other.pt"
        torch.save(content, path)
        with pytest.raises(ValueError, match=r"other\.pt is not one of fairseq"):
            load(str(path))

    def test_allows_nothing_more_to_others(self, load, tmp_path: Path) -> None:
        path = tmp_path / "checkpoint.pt"
        torch.save(self.checkpoint(), path)
        before = torch.serialization.get_safe_globals()
        load(str(path))
        assert set(torch.serialization.get_safe_globals()) == set(before)


class TestCheckpointCopies:
    """Through the function by which fairseq saves what a training goes on from."""

    @pytest.fixture
    def save(self, our_fairseq: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        """Saves a checkpoint, which is the best so far, at the end of an epoch."""
        from fairseq import checkpoint_utils
        from fairseq.dataclass.configs import CheckpointConfig

        monkeypatch.setattr(checkpoint_utils.save_checkpoint, "best", 1.0, raising=False)
        config = CheckpointConfig(save_dir=str(tmp_path), no_epoch_checkpoints=True)
        epochs = SimpleNamespace(epoch=1, end_of_epoch=lambda: True, state_dict=dict)

        def save(content: str) -> None:
            trainer = SimpleNamespace(
                data_parallel_rank=0,
                checkpoint_suffix="",
                should_save_checkpoint_on_current_rank=True,
                consolidate_optimizer=lambda: None,
                get_num_updates=lambda: 7,
                save_checkpoint=lambda path, state: Path(path).write_text(content),
            )
            checkpoint_utils.save_checkpoint(config, trainer, epochs, 1.0)

        return save

    def test_a_copy_that_is_cut_off_leaves_the_last_checkpoint_whole(
        self, save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from fairseq.file_io import PathManager

        def cut_off(source: str, target: str, **options: bool) -> None:
            Path(target).write_text(Path(source).read_text()[:1])
            raise KeyboardInterrupt

        best, last = tmp_path / "checkpoint_best.pt", tmp_path / "checkpoint_last.pt"
        save("first")
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(PathManager, "copy", cut_off)
            save("second")
        assert (best.read_text(), last.read_text()) == ("second", "first")
        save("third")
        assert (best.read_text(), last.read_text()) == ("third", "third")
        assert sorted(tmp_path.iterdir()) == [best, last]


class TestRepeatedNgrams:
    """What fairseq's search takes away from a token's choices."""

    @pytest.fixture
    def choices(self, our_fairseq: None):
        """The tokens of 4 to 9, and the end, 2, that may follow the words of a buffer that is longer than they are."""
        from fairseq.ngram_repeat_block import NGramRepeatBlock

        def choices(size: int, *rows: list[int], only: int | None = None) -> list[set[int]]:
            step = len(rows[0])
            tokens = torch.full((len(rows), step + 5), 1)
            tokens[:, : step + 1] = torch.tensor([[2, *row] for row in rows])
            allowed = [2, *range(4, 10)] if only is None else [only]
            scores = torch.full((len(rows), 10), float("-inf"))
            scores[:, allowed] = -1.0
            found = NGramRepeatBlock(size, use_extension=False)(tokens, scores, len(rows), 1, step)
            return [set(row.isfinite().nonzero().flatten().tolist()) for row in found]

        return choices

    EVERY = frozenset({2, *range(4, 10)})

    @pytest.mark.parametrize(
        ("size", "words", "forbidden"),
        [
            (1, [], set()),
            (1, [4, 5], {4, 5}),  # and not the end, which is at the beginning, too
            (2, [4], set()),
            (2, [4, 4], {4}),
            (2, [4, 5, 6, 4], {5}),
            (2, [4, 5, 4, 6, 4], {5, 6}),
            (3, [4, 5, 6, 4], set()),
            (3, [4, 5, 6, 4, 5], {6}),
            (3, [4, 4, 4], {4}),
        ],
    )
    def test_forbid_what_came_after_the_same_words(
        self, choices, size: int, words: list[int], forbidden: set[int]
    ) -> None:
        assert choices(size, words) == [self.EVERY - forbidden]

    def test_are_those_of_each_hypothesis(self, choices) -> None:
        assert choices(2, [4, 5, 4], [4, 6, 4], [4, 5, 6]) == [self.EVERY - {5}, self.EVERY - {6}, self.EVERY]

    @pytest.mark.parametrize("only", [2, 5])
    def test_leave_what_there_is_no_choice_of(self, choices, only: int) -> None:
        for size in (1, 2, 3):
            assert choices(size, [5, 5, 5], only=only) == [{only}]

    def test_can_be_scripted_as_before(self) -> None:
        from fairseq.ngram_repeat_block import NGramRepeatBlock

        torch.jit.script(NGramRepeatBlock(2, use_extension=False))
