"""What made fairseq run commands or code that are in a file or in its name, or write where it should not.

Each row of a cure: a file, what stands there, and what takes its place (`fairseq_cures.Edit`). A rewriting changes all
files in which it finds something.
"""

import re
from collections.abc import Callable

_FASTA = "fairseq/data/fasta_dataset.py"
_FILES = "fairseq/file_utils.py"
_DENOISE = "fairseq/examples/speech_synthesis/preprocessing/denoise_and_vad_audio.py"
_VAD = "fairseq/examples/speech_synthesis/preprocessing/vad/__init__.py"
_VIDEOS = "fairseq/examples/MMPT/scripts/video_feature_extractor/videoreader.py"
_JOBS = "fairseq/examples/MMPT/mmpt_cli/localjob.py"
_MINING = "fairseq/examples/criss/mining/mine.py"
_BINARIZE = "fairseq/examples/multilingual/data_scripts/binarize.py"

SAFETY_CURES: dict[str, list[tuple[str, str, str]]] = {
    # The path of a data set in FASTA's format became part of a line for a shell. Its index was kept beside it: a link
    # of that name made fairseq write elsewhere, and of data that changed the index stayed. Now it is not kept, whatever
    # `cache_indices` is.
    "fasta_without_a_shell": [
        (_FASTA, "import subprocess\n", ""),
        (_FASTA, "from pathlib import Path\n", ""),
        (_FASTA, "import torch\n", "import torch\n\nfrom fairseq.integrity import why_not_regular\n"),
        (
            _FASTA,
            """        self.cache = Path(f"{path}.fasta.idx.npy")
        if cache_indices:
            if self.cache.exists():
                self.offsets, self.sizes = np.load(self.cache)
            else:
                self.offsets, self.sizes = self._build_index(path)
                np.save(self.cache, np.stack([self.offsets, self.sizes]))
        else:
            self.offsets, self.sizes = self._build_index(path)
""",
            "        self.offsets, self.sizes = self._build_index(path)\n",
        ),
        (
            _FASTA,
            r"""        # Use grep and awk to get 100M/s on local SSD.
        # Should process your enormous 100G fasta in ~10 min single core...
        path = fasta_file_path(path)
        bytes_offsets = subprocess.check_output(
            f"cat {path} | tqdm --bytes --total $(wc -c < {path})"
            "| grep --byte-offset '^>' -o | cut -d: -f1",
            shell=True,
        )
        fasta_lengths = subprocess.check_output(
            f"cat {path} | tqdm --bytes --total $(wc -c < {path})"
            "| awk '/^>/ {print \"\";next;} { printf(\"%s\",$0);}' | tail -n+2 | awk '{print length($1)}'",
            shell=True,
        )
        bytes_np = np.fromstring(bytes_offsets, dtype=np.int64, sep=" ")
        sizes_np = np.fromstring(fasta_lengths, dtype=np.int64, sep=" ")
        return bytes_np, sizes_np
""",
            """        path = fasta_file_path(path)
        if reason := why_not_regular(path):
            raise ValueError(f"{path} {reason}")
        offsets, sizes, position = [], [], 0
        with open(path, "rb") as f:
            for line in f:
                if line.startswith(b">"):
                    offsets.append(position)
                    sizes.append(0)
                elif sizes:
                    sizes[-1] += len(line.decode("utf-8", "replace").strip())
                position += len(line)
        return np.array(offsets, dtype=np.int64), np.array(sizes, dtype=np.int64)
""",
        ),
    ],
    # from_pretrained("model.tar.gz") unpacked whatever the archive named, also outside of its folder, and put the
    # folder in the archive's place. `fairseq_archives.py` unpacks into fairseq's cache. A download that was cut off
    # there passed for the file.
    "archives_stay_and_stay_within": [
        (_FILES, "import tarfile\n", ""),
        (
            _FILES,
            "from io import open\n",
            "from io import open\n\nfrom fairseq.archives import unpack\n",
        ),
        (
            _FILES,
            """    # Extract archive to temp dir and replace .tar.bz2 if necessary
    tempdir = None
    if not os.path.isdir(resolved_archive_file):
        tempdir = tempfile.mkdtemp()
        logger.info(
            "extracting archive file {} to temp dir {}".format(
                resolved_archive_file, tempdir
            )
        )
        ext = os.path.splitext(archive_file)[1][1:]
        with tarfile.open(resolved_archive_file, "r:" + ext) as archive:
            top_dir = os.path.commonprefix(archive.getnames())
            archive.extractall(tempdir)
        os.remove(resolved_archive_file)
        shutil.move(os.path.join(tempdir, top_dir), resolved_archive_file)
        shutil.rmtree(tempdir)

    return resolved_archive_file
""",
            """    if os.path.isdir(resolved_archive_file):
        return resolved_archive_file
    return unpack(resolved_archive_file, str(PYTORCH_FAIRSEQ_CACHE))
""",
        ),
        (
            _FILES,
            """            with open(cache_path, "wb") as cache_file:
                shutil.copyfileobj(temp_file, cache_file)
""",
            """            with tempfile.NamedTemporaryFile(dir=cache_dir, delete=False) as cache_file:
                shutil.copyfileobj(temp_file, cache_file)
            os.replace(cache_file.name, cache_path)
""",
        ),
    ],
    # Programs among fairseq's examples that put names of files into lines for a shell.
    "examples_without_a_shell": [
        (
            _DENOISE,
            '    cmd = f"sox {inpath} -r {sr} {output_path}"\n    os.system(cmd)\n',
            '    subprocess.call(["sox", inpath, "-r", str(sr), output_path])\n',
        ),
        (_DENOISE, "import os\n", "import os\nimport subprocess\n"),
        (
            _VAD,
            '        cmd = f"mkdir -p {args.out_path}"\n        os.system(cmd)\n',
            "        os.makedirs(args.out_path, exist_ok=True)\n",
        ),
        (
            _VIDEOS,
            """            cmd = "wget -O" + output_file + " " + video_path
            # import subprocess
            # subprocess.check_output(
            #    cmd,
            #    stderr=subprocess.STDOUT, shell=True)
            os.system(cmd)
""",
            '            subprocess.call(["wget", "-O", output_file, "--", video_path])\n',
        ),
        (_VIDEOS, "import os\n", "import os\nimport subprocess\n"),
        (_JOBS, 'os.system(" ".join(cmd_list))', 'subprocess.call(shlex.split(" ".join(cmd_list)))'),
        (_JOBS, "import os\n", "import os\nimport shlex\nimport subprocess\n"),
        (_MINING, "    check_call(cmd, shell=True)\n", "    check_call(shlex.split(cmd))\n"),
        (_MINING, "import glob\n", "import glob\nimport shlex\n"),
        (_BINARIZE, "check_output(cmd, shell=True)", "check_output(shlex.split(cmd))"),
        (_BINARIZE, "    check_call(cmd, shell=True)\n", "    check_call(shlex.split(cmd))\n"),
        (_BINARIZE, "import glob\n", "import glob\nimport shlex\n"),
    ],
}

_EVAL = re.compile(r"(?<![\w.])eval\(")
_LOAD = re.compile(r"\b(?:torch|th)\.load\(")
_IMPORT = re.compile(r"^(?!from __future__)(import|from) ", re.MULTILINE)


def _literals(text: str) -> str:
    """Puts `fairseq.settings.literal` in the place of every `eval`.

    fairseq runs strings of a model's settings as Python. They come from the checkpoint, so that whoever wrote it could
    run anything on the machine of whoever scores it.
    """
    first = _IMPORT.search(text)
    if first is None or not _EVAL.search(text):
        return text
    start = first.start()
    return text[:start] + "from fairseq.settings import literal\n" + _EVAL.sub("literal(", text[start:])


def _tensors_alone(text: str) -> str:
    """Says in every `torch.load` that nothing but tensors may be loaded, whatever the environment sets."""
    parts, end = [], 0
    for call in _LOAD.finditer(text):
        close = _closing(text, call.end())
        arguments = text[call.end() : close]
        if "weights_only" not in arguments:
            given = arguments.rstrip().removesuffix(",")
            parts += [text[end : call.end()], given, ", weights_only=True", arguments[len(arguments.rstrip()) :]]
            end = close
    return "".join(parts) + text[end:]


def _closing(text: str, start: int) -> int:
    """The place of the parenthesis that closes the one before `start`."""
    depth = 1
    for place in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if not depth:
            return place
    return len(text)


def _plain_yaml(text: str) -> str:
    """YAML of plain values; the full loader also makes objects of what releases of PyYAML take for harmless."""
    return text.replace("Loader=yaml.FullLoader", "Loader=yaml.SafeLoader")


REWRITINGS: dict[str, Callable[[str], str]] = {
    "reads a setting by eval": _literals,
    "loads by torch.load": _tensors_alone,
    "loads YAML by the full loader": _plain_yaml,
}
"""What a file does that is changed, and its changed text."""
