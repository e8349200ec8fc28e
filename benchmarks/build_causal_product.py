"""Builds the causal_product kernel of pytorch-fast-transformers 0.4.0 from PyPI, a peer of the sum rule on the CPU.

    python benchmarks/build_causal_product.py

The extension is compiled with -O3 -march=native -ffast-math -fopenmp (the package's own flags are -fopenmp -ffast-math
and those of Python's build) and put into build/peers, where the benchmarks look for it; nothing is installed. Needs
this Python's torch, setuptools and ninja, a C++ compiler and PyPI, and about a minute.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from harness.implementations import PEERS
from harness.program import make_parser
from torch.utils import cpp_extension

PACKAGE, VERSION, KERNEL = "pytorch-fast-transformers", "0.4.0", "causal_product_cpu"
FLAGS = ["-O3", "-march=native", "-ffast-math", "-fopenmp"]


def main() -> None:
    """Puts the package's Python files and the compiled kernel into build/peers/fast_transformers."""
    make_parser(__doc__).parse_args()
    target = PEERS / "fast_transformers"
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        flags = "--no-deps --no-build-isolation --no-binary :all: --dest".split()
        command = [sys.executable, "-m", "pip", "download", *flags, name, f"{PACKAGE}=={VERSION}"]
        # Its setup.py, which pip runs for the metadata, asks for CUDA where it can start nvcc.
        subprocess.run(command, check=True, env={**os.environ, "PATH": ""})
        [archive] = work.glob("*.tar.gz")
        shutil.unpack_archive(archive, work, filter="data")
        package = work / f"{PACKAGE}-{VERSION}" / target.name
        kernel = package / "causal_product" / f"{KERNEL}.cpp"
        options = {"extra_cflags": FLAGS, "extra_ldflags": ["-fopenmp"], "with_cuda": False}
        cpp_extension.load(KERNEL, [str(kernel)], build_directory=name, verbose=True, **options)
        shutil.copy(work / f"{KERNEL}.so", kernel.parent)
        shutil.copytree(package, target, dirs_exist_ok=True)
    print(f"{target}: {PACKAGE} {VERSION}'s causal_product, compiled with {' '.join(FLAGS)}")


if __name__ == "__main__":
    main()
