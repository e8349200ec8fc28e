"""fairseq tasks. fairseq imports every module of this folder, which registers its tasks and criteria."""

from fairseq_fastweights import command_line
from fairseq_fastweights.data import tokenizer_json  # noqa: F401  which registers --bpe tokenizer_json

command_line.install()
