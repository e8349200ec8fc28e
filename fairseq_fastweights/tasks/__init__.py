"""fairseq tasks. fairseq imports every module of this folder, which registers its tasks and criteria."""

from fairseq_fastweights import command_line
from fairseq_fastweights.data import byte_level_bpe, tokenizer_json  # noqa: F401  which register values of --bpe

command_line.install()
