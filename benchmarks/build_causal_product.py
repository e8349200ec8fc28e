"""Builds the causal_product kernel of pytorch-fast-transformers 0.4.0 from PyPI, a peer of the sum rule on the CPU.

    python benchmarks/build_causal_product.py [FOLDER]

The one extension that is compared is compiled with -O3 -march=native -ffast-math -fopenmp (the package's own flags are
-fopenmp -ffast-math and what Python was built with) and put into FOLDER (default: build/peers), where the benchmarks
look for it; nothing is installed. Needs this Python's torch, setuptools and ninja, a C++ compiler and PyPI, and about a
minute. FOLDER/fast_transformers/BUILD.json says how it was built.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import torch
from harness.contestants import BUILD_FLAGS, BUILD_RECORD, DEFAULT_FOLDER
from harness.program import make_parser
from torch.utils import cpp_extension

PACKAGE, VERSION, NAME = "pytorch-fast-transformers", "0.4.0", "causal_product_cpu"


def download(folder: Path) -> Path:
    """Fetches the package's source; returns the folder of its Python files."""
    # Its setup.py, which pip runs for the metadata, asks for CUDA where it can start nvcc.
    folders = os.environ.get("PATH", "").split(os.pathsep)
    path = os.pathsep.join(part for part in folders if not (Path(part) / "nvcc").exists())
    flags = "--no-deps --no-build-isolation --no-binary :all: --dest".split()
    command = [sys.executable, "-m", "pip", "download", *flags, str(folder), f"{PACKAGE}=={VERSION}"]
    subprocess.run(command, check=True, env={**os.environ, "PATH": path})
    [archive] = folder.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    return folder / f"{PACKAGE}-{VERSION}" / "fast_transformers"


def main() -> None:
    """Puts the package's Python files and the compiled kernel into FOLDER/fast_transformers."""
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=DEFAULT_FOLDER, help="default: %(default)s")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as sources, tempfile.TemporaryDirectory() as compiled:
        package = download(Path(sources))
        folder = package / "causal_product"
        flags = {"extra_cflags": list(BUILD_FLAGS), "extra_ldflags": ["-fopenmp"], "with_cuda": False}
        cpp_extension.load(NAME, [str(folder / f"{NAME}.cpp")], build_directory=compiled, verbose=True, **flags)
        shutil.copy(Path(compiled) / f"{NAME}.so", folder)
        compiler = subprocess.check_output([os.environ.get("CXX", "c++"), "--version"], text=True).splitlines()[0]
        record = {"flags": list(BUILD_FLAGS), "compiler": compiler, "torch": torch.__version__}
        (package / BUILD_RECORD).write_text(json.dumps(record, indent=2) + "\n")
        target = options.folder.resolve() / package.name
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(package, target)
    print(f"{options.folder}: {PACKAGE} {VERSION}'s causal_product, compiled with {' '.join(BUILD_FLAGS)}")


if __name__ == "__main__":
    main()
