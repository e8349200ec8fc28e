"""lm-evaluation-harness with this project's models: `python -m fairseq_fastweights.lm_eval`, then lm_eval's arguments.

    python -m fairseq_fastweights.lm_eval --model fairseq-fastweights --model_args checkpoint=FILE --tasks hellaswag
    python -m fairseq_fastweights.lm_eval --model hf --model_args pretrained=FOLDER --tasks hellaswag

lm_eval loads no plugins by itself, so that this registers the models first: `fairseq-fastweights`, which takes a
checkpoint of fairseq as it is (`fairseq_fastweights.lm_eval.model`), and transformers' Auto classes for FOLDER, what
`to-huggingface` wrote.
"""

from __future__ import annotations

import logging
import sys
import textwrap


def main() -> int:
    """Runs lm_eval's command with the arguments of this one; returns the exit status."""
    try:
        from lm_eval.__main__ import cli_evaluate

        import fairseq_fastweights.huggingface
        import fairseq_fastweights.lm_eval.model  # noqa: F401
    except ModuleNotFoundError as error:
        print(f"lm_eval: there is no package {error.name}; pip install 'fairseq-fastweights[eval]'", file=sys.stderr)
        return 1
    try:
        cli_evaluate()
    except (OSError, ValueError) as error:
        told = textwrap.shorten(str(error), 500) or type(error).__name__
        if isinstance(error, ConnectionError):  # it names the data set or the model
            told += "; it must be in the cache of HF_HOME, or --include_path name tasks that read files"
        logging.getLogger("lm_eval").debug("where it comes from", exc_info=True)
        print(f"lm_eval: {told}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
