"""Opens the patches of fairseq as commits of a git repository, and saves such commits as patches.

    python tools/edit_patches.py open FOLDER
    python tools/edit_patches.py save FOLDER

In the repository that `open` makes, the tag `released` is fairseq 0.12.2 with safe calls, and each commit after it is a
patch, with the patch's head as its message. They are changed as commits are, for example by `git commit --fixup` and
`git rebase --interactive --autosquash released`. `save` writes all patches anew, in files named by the first lines of
the messages.
"""

import argparse
import re
import shutil
import sys
import tempfile
from pathlib import Path

import fairseq_patches
from build_fairseq import download
from fairseq_patches import BuildError, git

AUTHOR = ("-c", "user.name=fairseq-fastweights", "-c", "user.email=fairseq-fastweights@localhost")


def main(arguments: list[str] | None = None) -> int:
    """Opens or saves; returns the exit status."""
    parser = argparse.ArgumentParser(description="Changes the patches of fairseq 0.12.2 as commits of git.")
    parser.add_argument("what", choices=("open", "save"), help="make a repository of the patches, or patches of it")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the repository is; `open` makes the folder")
    options = parser.parse_args(arguments)
    try:
        (open_patches if options.what == "open" else save_patches)(options.folder.absolute())
    except (BuildError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def open_patches(folder: Path) -> None:
    """Makes the repository in a new folder."""
    if folder.exists():
        raise BuildError(f"{folder} exists; FOLDER must be a new one")
    with tempfile.TemporaryDirectory(prefix=".fairseq-", dir=folder.parent) as work:
        source = Path(work) / "fairseq"
        shutil.copytree(download(Path(work)), source)  # unpacked by root, files keep owners, whom git distrusts
        git("init", "--quiet", folder=source, doing="make a repository")
        fairseq_patches.make_calls_safe(source)
        _commit(source, "fairseq 0.12.2")
        git("tag", "released", folder=source, doing="name the release")
        for patch in fairseq_patches.in_order():
            git("apply", str(patch), folder=source, doing=f"apply {patch.name} to the source of fairseq 0.12.2")
            _commit(source, patch.read_text(encoding="utf-8").partition("\n--- ")[0])
        source.rename(folder)


def _commit(source: Path, message: str) -> None:
    git("add", "--all", "--force", folder=source, doing="add files")
    git(*AUTHOR, "commit", "--quiet", "--message", message, folder=source, doing="commit a patch")


def save_patches(folder: Path) -> None:
    """Writes the patches anew, from all commits after the release."""
    if not (folder / ".git").is_dir():
        raise BuildError(f"{folder} is no repository; FOLDER must be one that `open` made")
    if changed := git("status", "--porcelain", folder=folder, doing=f"read {folder}").splitlines():
        raise BuildError(f"{folder}: {len(changed)} changed files are not committed, among them {changed[0][3:]}")
    commits = git("rev-list", "--reverse", "released..HEAD", folder=folder, doing="find the tag `released`").split()
    written = {}
    for number, commit in enumerate(commits, start=1):
        head = git("log", "-1", "--format=%B", commit, folder=folder, doing="read a commit").strip()
        # One line of context is enough: the source that patches apply to is always the same.
        diff = git("diff", "--no-renames", "--unified=1", f"{commit}^", commit, folder=folder, doing="compare commits")
        name = re.sub(r"[^a-z0-9]+", "-", head.partition("\n")[0].lower()).strip("-")
        # git apply needs none of these lines.
        diff = re.sub("^(index|diff --git|new file mode) .*\n", "", diff, flags=re.MULTILINE)
        written[f"{number:04d}-{name}.patch"] = f"{head}\n\n{diff}"
    for patch in fairseq_patches.in_order():
        patch.unlink()
    for name, text in written.items():
        (fairseq_patches.PATCHES / name).write_text(text, encoding="utf-8")
    print(f"{len(written)} patches are in {fairseq_patches.PATCHES}")


if __name__ == "__main__":
    sys.exit(main())
