"""What fairseq does with a checkpoint that is damaged, or asks for more than it could hold.

Each row of a cure: a file, what stands there, and what takes its place (`fairseq_cures.Edit`).
"""

_CHECKPOINTS = "fairseq/checkpoint_utils.py"
_MODELS = "fairseq/models/fairseq_model.py"
_LOADS = "        return super().load_state_dict(new_state_dict, strict)\n"

LOADING_CURES: dict[str, list[tuple[str, str, str]]] = {
    # torch refuses the `argparse.Namespace` in checkpoints of fairseq. A loader that allows what such checkpoints need,
    # and no more, takes its place; `apply_cures` puts it there.
    "safe_checkpoints": [
        (
            _CHECKPOINTS,
            "\nfrom fairseq.data import data_utils\n",
            "\nfrom fairseq.checkpoint_loader import load_checkpoint_file\nfrom fairseq.data import data_utils\n",
        ),
        (_CHECKPOINTS, 'torch.load(f, map_location=torch.device("cpu"))', "load_checkpoint_file(f, path)"),
        (
            _CHECKPOINTS,
            """torch.load(
            f,
            map_location=(
                lambda s, _: torch.serialization.default_restore_location(s, "cpu")
            ),
        )""",
            'load_checkpoint_file(f, fpath, "extra_state")',  # a moving average alone has no model
        ),
    ],
    # A checkpoint with a flipped bit was loaded without a word, and a pipe in its place waited for. What is saved has
    # digests (`fairseq_checkpoint_writer.py`), which the loader of `safe_checkpoints` compares.
    "noticed_damage": [
        (
            _CHECKPOINTS,
            "from fairseq.file_io import PathManager\n",
            "from fairseq.checkpoint_loader import names_the_file, open_checkpoint\n"
            "from fairseq.file_io import PathManager\n",
        ),
        (_CHECKPOINTS, 'with open(local_path, "rb") as f:', "with open_checkpoint(local_path, path) as f:"),
        # What is damaged and has no digests ended in an error about a key or an attribute that named no file.
        (_CHECKPOINTS, "def load_checkpoint_to_cpu(", "@names_the_file\ndef load_checkpoint_to_cpu("),
    ],
    # A model was made as large as a checkpoint's settings said, before a weight of it was looked at: a file of a few
    # bytes could ask for any memory. Weights of other kinds were taken for real numbers, and NaN was loaded.
    "models_no_larger_than_their_weights": [
        (
            _CHECKPOINTS,
            """                if "from_checkpoint" in argspec.args:
                    model = task.build_model(cfg.model, from_checkpoint=True)
                else:
                    model = task.build_model(cfg.model)
""",
            """                options = {"from_checkpoint": True} if "from_checkpoint" in argspec.args else {}
                with making_model(filename, cfg.model, state["model"]):
                    model = task.build_model(cfg.model, **options)
""",
        ),
        (
            _CHECKPOINTS,
            """                model.load_state_dict(
                    state["model"], strict=strict, model_cfg=cfg.model
                )
""",
            """                load_weights(model, filename, state["model"], strict, cfg.model)
""",
        ),
        (
            _CHECKPOINTS,
            "from fairseq.models import FairseqDecoder, FairseqEncoder\n",
            "from fairseq.models import FairseqDecoder, FairseqEncoder\n"
            "from fairseq.models_of_checkpoints import load_weights, making_model\n",
        ),
        *(
            (_MODELS, f"{_LOADS}{after}", f"        check_kinds(self, new_state_dict)\n{_LOADS}{after}")
            for after in ("\n    def upgrade_state_dict(", "\n\nclass FairseqLanguageModel(")
        ),
        (
            _MODELS,
            "from fairseq.models import FairseqDecoder, FairseqEncoder\n",
            "from fairseq.models import FairseqDecoder, FairseqEncoder\n"
            "from fairseq.models_of_checkpoints import check_kinds\n",
        ),
    ],
    # A perplexity of nan was a result like any other.
    "scores_that_are_numbers": [
        (
            "fairseq_cli/eval_lm.py",
            """    logger.info(
        "Loss (base 2): {:.4f}, Perplexity: {:.2f}".format(
""",
            """    check_score(cfg.common_eval.path, results["loss"])
    logger.info(
        "Loss (base 2): {:.4f}, Perplexity: {:.2f}".format(
""",
        ),
        (
            "fairseq_cli/eval_lm.py",
            "from fairseq.sequence_scorer import SequenceScorer\n",
            "from fairseq.models_of_checkpoints import check_score\n"
            "from fairseq.sequence_scorer import SequenceScorer\n",
        ),
    ],
}
