"""Data that changes while it is read, dictionaries that cannot be read again, and text that is not text.

Each row of a cure: a file, what stands there, and what takes its place (`fairseq_cures.Edit`). A rewriting changes all
files in which it finds something.
"""

import re
from collections.abc import Callable

_DATA = "fairseq/data/data_utils.py"
_DICTIONARY = "fairseq/data/dictionary.py"
_FASTA = "fairseq/data/fasta_dataset.py"
_HUFFMAN = "fairseq/data/huffman/huffman_mmap_indexed_dataset.py"
_INDEXED = "fairseq/data/indexed_dataset.py"
_ITERATORS = "fairseq/data/iterators.py"
_LANGUAGES = "fairseq/data/multilingual/multilingual_data_manager.py"
_PREPROCESS = "fairseq_cli/preprocess.py"
_INTERACTIVE = "fairseq_cli/interactive.py"
_SUBWORDS = "fairseq/data/encoders/subword_nmt_bpe.py"
_TRAINER = "fairseq/trainer.py"
_UTILS = "fairseq/utils.py"

DATA_CURES: dict[str, list[tuple[str, str, str]]] = {
    # Binarised data that is cut short, or of another dictionary, was an error of NumPy's or PyTorch's, often after an
    # hour of training. What there is of it is looked at first.
    "checked_data": [
        (
            _DATA,
            "        dataset_impl_k = dataset_impl\n",
            "        check_split(path_k, dictionary)\n        dataset_impl_k = dataset_impl\n",
        ),
        (
            _DATA,
            "from fairseq.file_io import PathManager\n",
            "from fairseq.binarised_data import check_split\nfrom fairseq.file_io import PathManager\n",
        ),
        # A folder or a pipe in the place of dict.txt; and which row of which file is wrong.
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
            """                    f"line {number}: Incorrect dictionary format, expected '<token> <cnt> [flags]': {line!r}"
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
            "    def __getitem__(self, idx):\n        if idx < len(self.symbols):\n            return self.symbols[idx]\n"
            "        return self.unk_word\n",
            "    overwritten = {}  # special symbols by their first numbers, where they have others\n\n"
            "    def __getitem__(self, idx):\n        if idx < len(self.symbols):\n"
            "            return self.overwritten.get(int(idx), self.symbols[idx])\n"
            "        return self.unk_word\n",
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
            """        marked, mark = set(self.overwritten.values()), "\\ufeff"
        for k, v in kv_iterator:
            if "\\n" in k:
                raise ValueError(f"the dictionary has the symbol {k!r}, which cannot be saved: it ends a line")
            before = mark if k.startswith(mark) else ""
            print("{}{} {}{}".format(before, k, v, " #fairseq:overwrite" if k in marked else ""), file=f)
            mark = " "
""",
        ),
    ],
    # A file under a memory map that is cut short ends the process with SIGBUS, without a word; in other ways of
    # reading, what memory held by chance was taken for tokens. `fairseq_data_files.py` says how it is read.
    "data_that_changes": [
        (
            _INDEXED,
            "from fairseq.data.fasta_dataset import FastaDataset\n",
            "from fairseq.data.fasta_dataset import FastaDataset\nfrom fairseq.data_files import DataFile\n",
        ),
        (
            _INDEXED,
            "        self.data_file = None\n        self.read_index(path)\n",
            "        self.index_file = DataFile(index_file_path(path))\n        self.read_index(path)\n"
            "        self.index_file.check()\n        self.data_file = DataFile(data_file_path(path))\n",
        ),
        (
            _INDEXED,
            """    def read_data(self, path):
        self.data_file = open(data_file_path(path), "rb", buffering=0)

    def check_index""",
            "    def check_index",
        ),
        (
            _INDEXED,
            """    def __del__(self):
        if self.data_file:
            self.data_file.close()

""",
            "",
        ),
        (
            _INDEXED,
            "        if not self.data_file:\n            self.read_data(self.path)\n        self.check_index(i)\n",
            "        self.check_index(i)\n",
        ),
        (
            _INDEXED,
            """        self.data_file.seek(self.data_offsets[i] * self.element_size)
        self.data_file.readinto(a)
        item""",
            "        self.data_file.read_into(a, self.data_offsets[i] * self.element_size)\n        item",
        ),
        (
            _INDEXED,
            "        if not self.data_file:\n            self.read_data(self.path)\n        indices",
            "        indices",
        ),
        (
            _INDEXED,
            """            self.data_file.seek(self.data_offsets[i] * self.element_size)
            self.data_file.readinto(a)
            ptx += size
        if self.data_file:
            # close and delete data file after prefetch so we can pickle
            self.data_file.close()
            self.data_file = None
""",
            "            self.data_file.read_into(a, self.data_offsets[i] * self.element_size)\n            ptx += size\n",
        ),
        (
            _INDEXED,
            """def _warmup_mmap_file(path):
    with open(path, "rb") as stream:
        while stream.read(100 * 1024 * 1024):
            pass


""",
            "",
        ),
        (
            _INDEXED,
            """                offset = stream.tell()

            _warmup_mmap_file(path)

            self._bin_buffer_mmap = np.memmap(path, mode="r", order="C")
            self._bin_buffer = memoryview(self._bin_buffer_mmap)
            self._sizes = np.frombuffer(
                self._bin_buffer, dtype=np.int32, count=self._len, offset=offset
            )
            self._pointers = np.frombuffer(
                self._bin_buffer,
                dtype=np.int64,
                count=self._len,
                offset=offset + self._sizes.nbytes,
            )

        def __del__(self):
            self._bin_buffer_mmap._mmap.close()
            del self._bin_buffer_mmap

""",
            """                self._sizes = np.fromfile(stream, np.int32, self._len)
                self._pointers = np.fromfile(stream, np.int64, self._len)
            self._file.check()

""",
        ),
        (
            _INDEXED,
            """        def __init__(self, path):
            with open(path, "rb") as stream:
""",
            """        def __init__(self, path):
            self._file = DataFile(path)
            with open(path, "rb") as stream:
""",
        ),
        # Its text stays in memory.
        (
            _INDEXED,
            "    def read_data(self, path, dictionary):\n",
            "    def read_data(self, path, dictionary):\n        self._file = DataFile(path)\n",
        ),
        (
            _INDEXED,
            "        self.sizes = np.array(self.sizes)\n",
            "        self.sizes = np.array(self.sizes)\n        self._file.check()\n",
        ),
        # A data set's first batch is read before all of it is.
        (
            _INDEXED,
            "    def __getitem__(self, i):\n        self.check_index(i)\n        tensor_size",
            "    def __getitem__(self, i):\n        self.check_index(i)\n        if i not in self.cache_index:\n"
            "            return super().__getitem__(i)\n        tensor_size",
        ),
        (
            _INDEXED,
            """        self._path = None
        self._index = None
        self._bin_buffer = None

        self._do_init(path)

    def __getstate__(self):
        return self._path

    def __setstate__(self, state):
        self._do_init(state)

    def _do_init(self, path):
        self._path = path
        self._index = self.Index(index_file_path(self._path))

        _warmup_mmap_file(data_file_path(self._path))
        self._bin_buffer_mmap = np.memmap(
            data_file_path(self._path), mode="r", order="C"
        )
        self._bin_buffer = memoryview(self._bin_buffer_mmap)

    def __del__(self):
        self._bin_buffer_mmap._mmap.close()
        del self._bin_buffer_mmap
        del self._index
""",
            """        self._path = path
        self._index = self.Index(index_file_path(self._path))
        self._file = DataFile(data_file_path(self._path))
""",
        ),
        (
            _INDEXED,
            """        np_array = np.frombuffer(
            self._bin_buffer, dtype=self._index.dtype, count=size, offset=ptr
        )
""",
            "        np_array = self._file.read(self._index.dtype, size, ptr)\n",
        ),
        (
            _HUFFMAN,
            "from fairseq.data.huffman import HuffmanCoder\n",
            "from fairseq.data.huffman import HuffmanCoder\nfrom fairseq.data_files import DataFile\n",
        ),
        (_HUFFMAN, "import mmap\nimport os\nimport shutil\n", "import shutil\n"),
        (
            _HUFFMAN,
            """            offset = stream.tell()

        indexed_dataset._warmup_mmap_file(path)

        self._bin_buffer_mmap = np.memmap(path, mode="r", order="C")
        self._bin_buffer = memoryview(self._bin_buffer_mmap)
        self._sizes = np.frombuffer(
            self._bin_buffer, dtype=np.int32, count=self._len, offset=offset
        )
        self._pointers = np.frombuffer(
            self._bin_buffer,
            dtype=np.int64,
            count=self._len,
            offset=offset + self._sizes.nbytes,
        )

    def __del__(self):
        self._bin_buffer_mmap._mmap.close()
        del self._bin_buffer_mmap

""",
            """            self._sizes = np.fromfile(stream, np.int32, self._len)
            self._pointers = np.fromfile(stream, np.int64, self._len)
        self._file.check()

""",
        ),
        (
            _HUFFMAN,
            """    def __init__(self, path):
        with open(path, "rb") as stream:
""",
            """    def __init__(self, path):
        self._file = DataFile(path)
        with open(path, "rb") as stream:
""",
        ),
        (
            _HUFFMAN,
            """        self._prefix_path = None
        self._index = None
        self._bin_buffer = None
        self._coder = None
        self._file = None

        self._bin_buffer_mmap = None

        self._do_init(prefix_path)

    def __getstate__(self):
        return self._prefix_path

    def __setstate__(self, state):
        self._do_init(state)

    def _do_init(self, prefix_path):
        self._prefix_path""",
            "        self._prefix_path",
        ),
        (
            _HUFFMAN,
            """
        indexed_dataset._warmup_mmap_file(
            indexed_dataset.data_file_path(self._prefix_path)
        )
        self._file = os.open(
            indexed_dataset.data_file_path(self._prefix_path), os.O_RDONLY
        )
        self._bin_buffer_mmap = mmap.mmap(
            self._file,
            self._index.data_len,
            access=mmap.ACCESS_READ,
        )
        self._bin_buffer = memoryview(self._bin_buffer_mmap)

    def __del__(self):
        del self._bin_buffer
        if self._file:
            os.close(self._file)
        del self._index
""",
            "        self._file = DataFile(indexed_dataset.data_file_path(self._prefix_path))\n",
        ),
        (
            _HUFFMAN,
            """        ptr, _ = self._index[i]
        if i == 0:
            raw_bytes = self._bin_buffer[:ptr]
        else:
            (prev_ptr, _) = self._index[i - 1]
            raw_bytes = self._bin_buffer[prev_ptr:ptr]
""",
            """        ptr, _ = self._index[i]
        prev_ptr = self._index[i - 1][0] if i else 0
        raw_bytes = self._file.read(np.uint8, ptr - prev_ptr, prev_ptr)
""",
        ),
    ],
    # Data that changed between two epochs or two starts of a run was read in the place of what was left, or ended in a
    # traceback that asks to report it.
    "data_of_a_training": [
        (
            _TRAINER,
            "from fairseq.file_io import PathManager\n",
            "from fairseq.data_files import TrainingFiles\nfrom fairseq.file_io import PathManager\n",
        ),
        (
            _TRAINER,
            "        self.cfg = cfg\n        self.task = task\n",
            "        self.cfg = cfg\n        self.task = task\n        self.data_files = TrainingFiles()\n",
        ),
        (
            _TRAINER,
            """            self.task.load_dataset(
                self.cfg.dataset.train_subset,
                epoch=epoch,
                combine=combine,
                data_selector=data_selector,
                tpu=self.tpu,
            )
""",
            """            with self.data_files.loading():
                self.task.load_dataset(
                    self.cfg.dataset.train_subset,
                    epoch=epoch,
                    combine=combine,
                    data_selector=data_selector,
                    tpu=self.tpu,
                )
""",
        ),
        (
            _TRAINER,
            "        self.reset_dummy_batch(batch_iterator.first_batch)\n"
            "        return batch_iterator\n\n    def get_valid_iterator",
            "        batch_iterator.files = self.data_files.now\n"
            "        self.reset_dummy_batch(batch_iterator.first_batch)\n"
            "        return batch_iterator\n\n    def get_valid_iterator",
        ),
        (
            _ITERATORS,
            "class EpochBatchIterating(object):\n",
            "class EpochBatchIterating(object):\n    files = {}  # of the data set, in training\n\n",
        ),
        (
            _ITERATORS,
            '            "iterations_in_epoch": iter_in_epoch,\n            "shuffle": self.shuffle,\n',
            '            "iterations_in_epoch": iter_in_epoch,\n            "shuffle": self.shuffle,\n'
            '            "files": kept(self.files),\n',
        ),
        (
            _ITERATORS,
            '        version = state_dict.get("version", 1)\n',
            '        version = state_dict.get("version", 1)\n'
            '        compare(self.files, state_dict.get("files", []), itr_pos > 0)\n',
        ),
        (
            _ITERATORS,
            """                    raise RuntimeError(
                        "Cannot resume training due to dataloader mismatch, please "
                        "report this to the fairseq developers. You can relaunch "
                        "training with `--reset-dataloader` and it should work."
                    )
""",
            """                    data = ", ".join(self.files) or "the data"
                    raise FileError(
                        f"{data}: the checkpoint stopped after {itr_pos} batches of an epoch, which now has no more; it "
                        "must be the same data in the same batches, or --reset-dataloader be given, which begins an "
                        "epoch"
                    )
""",
        ),
        (
            _ITERATORS,
            "from fairseq.data import data_utils\n",
            "from fairseq.data import data_utils\nfrom fairseq.data_files import compare, kept\n"
            "from fairseq.text_files import FileError\n",
        ),
    ],
    # fairseq-preprocess wrote over the data of running trainings, and left half of it where it was interrupted.
    "data_that_is_put_in_place": [
        (
            _PREPROCESS,
            "    task = tasks.get_task(args.task)\n\n    if args.joined_dictionary:\n",
            """    with put_in_place(args.destdir) as folder:
        _write(Namespace(**{**vars(args), "destdir": folder}), target)

    if not args.dict_only:
        logger.info("Wrote preprocessed data to {}".format(args.destdir))


def _write(args, target):
    task = tasks.get_task(args.task)

    if args.joined_dictionary:
""",
        ),
        (
            _PREPROCESS,
            """        _make_all_alignments(args)

    logger.info("Wrote preprocessed data to {}".format(args.destdir))

    if""",
            "        _make_all_alignments(args)\n\n    if",
        ),
        (
            _PREPROCESS,
            "from fairseq.data import Dictionary\n",
            "from fairseq.data import Dictionary\nfrom fairseq.whole_folders import put_in_place\n",
        ),
    ],
    # Where text is not read by `with open(...)`, which `DATA_REWRITINGS` look for.
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
        ("fairseq_cli/score.py", "score(sys.stdin)", "score(text_of(sys.stdin))"),
        (
            "fairseq_cli/score.py",
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
            "        self.fn = fasta_file_path(path)\n",
            "        self.fn = fasta_file_path(path)\n        self.file = DataFile(self.fn)\n",
        ),
        (_FASTA, "        return desc, seq\n", "        self.file.check()\n        return desc, seq\n"),
        (
            _FASTA,
            "import torch\n",
            "import torch\nfrom fairseq.data_files import DataFile\nfrom fairseq.text_files import decode\n",
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


DATA_REWRITINGS: dict[str, Callable[[str], str]] = {"reads text": _checked_text}
"""What a file does that is changed, and its changed text."""
