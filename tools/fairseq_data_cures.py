"""Data that changes while it is read, or between two starts of a run.

Each row of a cure: a file, what stands there, and what takes its place (`fairseq_cures.Edit`).
"""

_DATA = "fairseq/data/data_utils.py"
_FASTA = "fairseq/data/fasta_dataset.py"
_HUFFMAN = "fairseq/data/huffman/huffman_mmap_indexed_dataset.py"
_INDEXED = "fairseq/data/indexed_dataset.py"
_ITERATORS = "fairseq/data/iterators.py"
_PREPROCESS = "fairseq_cli/preprocess.py"
_TRAINER = "fairseq/trainer.py"

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
            """            self.data_file.read_into(a, self.data_offsets[i] * self.element_size)
            ptx += size
""",
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
        (
            _FASTA,
            "        self.fn = fasta_file_path(path)\n",
            "        self.fn = fasta_file_path(path)\n        self.file = DataFile(self.fn)\n",
        ),
        (_FASTA, "        return desc, seq\n", "        self.file.check()\n        return desc, seq\n"),
        (_FASTA, "import numpy as np\n", "import numpy as np\nfrom fairseq.data_files import DataFile\n"),
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
            '        batch_iterator.goes_on = self.cfg.checkpoint.restore_file == "checkpoint_last.pt"\n'
            "        self.reset_dummy_batch(batch_iterator.first_batch)\n"
            "        return batch_iterator\n\n    def get_valid_iterator",
        ),
        (
            _ITERATORS,
            "class EpochBatchIterating(object):\n",
            """class EpochBatchIterating(object):
    # In training, the files of the data set, and whether it goes on from a run's own last checkpoint.
    files = {}
    goes_on = True

""",
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
            '        compare(self.files, state_dict.get("files", []), itr_pos > 0, self.goes_on)\n',
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
                        f"{data}: the checkpoint stopped after {itr_pos} batches of an epoch, which now has no more; "
                        "it must be the same data in the same batches, or --reset-dataloader be given, which begins "
                        "an epoch"
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
}
