"""Dictionaries that cannot be read again, and text that is not text.

Each row of a cure: a file, what stands there, and what takes its place (`fairseq_cures.Edit`). A rewriting changes all
files in which it finds something.
"""

import re
from collections.abc import Callable

_DICTIONARY = "fairseq/data/dictionary.py"
_FASTA = "fairseq/data/fasta_dataset.py"
_INTERACTIVE = "fairseq_cli/interactive.py"
_LANGUAGES = "fairseq/data/multilingual/multilingual_data_manager.py"
_SCORE = "fairseq_cli/score.py"
_SUBWORDS = "fairseq/data/encoders/subword_nmt_bpe.py"
_UTILS = "fairseq/utils.py"

TEXT_CURES: dict[str, list[tuple[str, str, str]]] = {
    # A folder or a pipe in the place of dict.txt was read, or waited for; a row that is wrong was an error without a
    # file and a line.
    "checked_dictionaries": [
        (
            _DICTIONARY,
            """            try:
                with open(PathManager.get_local_path(f), "r", encoding="utf-8") as fd:
                    self.add_from_file(fd)
            except FileNotFoundError as fnfe:
                raise fnfe
            except UnicodeError:
                raise Exception(
                    "Incorrect encoding detected in {}, please "
                    "rebuild the dataset".format(f)
                )
            return
""",
            """            with open_dictionary(PathManager.get_local_path(f)) as fd:
                try:
                    self.add_from_file(fd)
                except FileError:
                    raise
                except (RuntimeError, ValueError) as error:
                    raise FileError(f"{f}, {error}") from None
            return
""",
        ),
        (
            _DICTIONARY,
            "from fairseq.file_io import PathManager\n",
            "from fairseq.binarised_data import open_dictionary\nfrom fairseq.file_io import PathManager\n"
            "from fairseq.text_files import FileError\n",
        ),
        (
            _DICTIONARY,
            "        for line in lines[indices_start_line:]:\n",
            "        for number, line in enumerate(lines[indices_start_line:], indices_start_line + 1):\n",
        ),
        (
            _DICTIONARY,
            """                        "Duplicate word found when loading Dictionary: '{}'. "
                        "Duplicate words can overwrite earlier ones by adding the "
                        "#fairseq:overwrite flag at the end of the corresponding row "
                        "in the dictionary file. If using the Camembert model, please "
                        "download an updated copy of the model file.".format(word)
""",
            """                        "line {}: Duplicate word found when loading Dictionary: '{}'. "
                        "Duplicate words can overwrite earlier ones by adding the "
                        "#fairseq:overwrite flag at the end of the corresponding row "
                        "in the dictionary file".format(number, word)
""",
        ),
        (
            _DICTIONARY,
            """                    f"Incorrect dictionary format, expected '<token> <cnt> [flags]': \\"{line}\\""
""",
            """                    f"line {number}: Incorrect dictionary format, "
                    f"expected '<token> <cnt> [flags]': {line!r}"
""",
        ),
    ],
    # A special symbol that a row with "#fairseq:overwrite" gives another number was saved without this mark, so that
    # the file could not be loaded, and stood twice among the symbols. Its first number, which nothing in a text has,
    # now goes by a name of its own. A word with a line break in it became two rows; a byte order mark that the first
    # word begins with would be taken for the file's.
    "dictionaries_that_can_be_loaded": [
        (
            _DICTIONARY,
            """    def __getitem__(self, idx):
        if idx < len(self.symbols):
            return self.symbols[idx]
        return self.unk_word
""",
            """    overwritten = {}  # special symbols by their first numbers, where they have others

    def __getitem__(self, idx):
        if idx < len(self.symbols):
            return self.overwritten.get(int(idx), self.symbols[idx])
        return self.unk_word
""",
        ),
        (
            _DICTIONARY,
            "            idx = len(self.symbols)\n            self.indices[word] = idx\n"
            "            self.symbols.append(word)\n            self.count.append(n)\n",
            """            idx = len(self.symbols)
            if word in self.indices:
                former = self.indices[word]
                if former in range(getattr(self, "nspecial", 0)):
                    self.overwritten = {**self.overwritten, former: word}
                self.symbols[former] = f"{word} (overwritten {former})"
                self.indices[self.symbols[former]] = former
            self.indices[word] = idx
            self.symbols.append(word)
            self.count.append(n)
""",
        ),
        (
            _DICTIONARY,
            """        for k, v in kv_iterator:
            print("{} {}".format(k, v), file=f)
""",
            """        marked = set(self.overwritten.values())
        for number, (k, v) in enumerate(kv_iterator):
            if "\\n" in k:
                raise ValueError(f"the dictionary has the symbol {k!r}, which cannot be saved: it ends a line")
            mark = "\\ufeff" if not number and k.startswith("\\ufeff") else ""
            print("{}{} {}{}".format(mark, k, v, " #fairseq:overwrite" if k in marked else ""), file=f)
""",
        ),
    ],
    # Where text is not read by `with open(...)`, which `TEXT_REWRITINGS` look for.
    "other_ways_to_read_text": [
        (
            _INTERACTIVE,
            'with fileinput.input(files=[input], openhook=fileinput.hook_encoded("utf-8")) as h:',
            'with text_of(sys.stdin) if input == "-" else open_text(input) as h:',
        ),
        (_INTERACTIVE, "import fileinput\n", ""),
        (
            _INTERACTIVE,
            "from fairseq.token_generation_constraints",
            "from fairseq.text_files import open_text, text_of\nfrom fairseq.token_generation_constraints",
        ),
        (_SCORE, "score(sys.stdin)", "score(text_of(sys.stdin))"),
        (
            _SCORE,
            "from fairseq.scoring import bleu\n",
            "from fairseq.scoring import bleu\nfrom fairseq.text_files import text_of\n",
        ),
        (
            _FASTA,
            '            self.threadlocal.f = open(self.fn, "r")\n',
            '            self.threadlocal.f = open(self.fn, "rb")\n',
        ),
        (
            _FASTA,
            """        desc = f.readline().strip()
        line = f.readline()
        seq = ""
        while line != "" and line[0] != ">":
            seq += line.strip()
            line = f.readline()
""",
            """        desc = decode(f.readline(), self.fn).strip()
        line = decode(f.readline(), self.fn)
        seq = ""
        while line != "" and line[0] != ">":
            seq += line.strip()
            line = decode(f.readline(), self.fn)
""",
        ),
        (
            _FASTA,
            "import torch\n",
            "import torch\nfrom fairseq.text_files import decode\n",
        ),
        (
            _LANGUAGES,
            """            with open(
                PathManager.get_local_path(args.lang_dict), "r", encoding="utf-8"
            ) as f:
""",
            "            with open_text(PathManager.get_local_path(args.lang_dict)) as f:\n",
        ),
        (_UTILS, "            with PathManager.open(values) as f:\n", "            with open_text(values) as f:\n"),
        (
            _SUBWORDS,
            "                bpe_args.codes,\n",
            "                StringIO(read_text(codes)),\n",
        ),
        (
            _SUBWORDS,
            "from fairseq import file_utils\n",
            "from fairseq import file_utils\nfrom fairseq.text_files import read_text\n",
        ),
        (_SUBWORDS, "from dataclasses import", "from io import StringIO\nfrom dataclasses import"),
    ],
}

_OPEN = re.compile(r'\bwith open\(([^\n,]+)(?:, "r")?(?:, encoding="utf-8")?\) as ')
_IMPORT = re.compile(r"^(?!from __future__)(import|from) ", re.MULTILINE)


def _checked_text(text: str) -> str:
    """Puts `fairseq.text_files.open_text` in the place of every `open` for reading text.

    The encoding was the locale's, or UTF-8 with the byte order mark as part of the text; what could not be decoded was
    an error without a file's name.
    """
    first = _IMPORT.search(text)
    if first is None or not _OPEN.search(text) or "import setuptools" in text or "from setuptools" in text:
        return text
    start = first.start()
    return (
        text[:start] + "from fairseq.text_files import open_text\n" + _OPEN.sub(r"with open_text(\1) as ", text[start:])
    )


TEXT_REWRITINGS: dict[str, Callable[[str], str]] = {"reads text": _checked_text}
"""What a file does that is changed, and its changed text."""
