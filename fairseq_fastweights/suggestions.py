"""Names what a mistyped option or value may have been meant to be.

It knows Python's own library alone, so that `tools/build_fairseq.py` can put it into fairseq, too.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Iterator
from typing import NoReturn


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown word: "; did you mean X?", or nothing where nothing known is like it.

    Examples:
        >>> did_you_mean("gated-dleta", ["delta", "gated-delta", "softmax"])
        '; did you mean gated-delta?'
        >>> did_you_mean("x", ["delta"])
        ''
    """
    names = {name.replace("_", "-"): name for name in known}
    near = difflib.get_close_matches(word.replace("_", "-"), names, n=1)
    return f"; did you mean {names[near[0]]}?" if near else ""


class ArgumentParser(argparse.ArgumentParser):
    """A parser of command lines whose errors say which option or choice may have been meant."""

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (.*)", message)
        wrong = re.match(r"argument ([^\s:/,]+)[^:]*: (?:invalid choice:|there is no) '([^']*)'", message)
        if unknown:
            options = [word.partition("=")[0] for word in unknown[1].split() if word.startswith("--")]
            message += "".join(did_you_mean(word, self._every_option()) for word in options[:1])
        elif wrong:
            action = next((a for a in self._actions if wrong[1] in (*a.option_strings, a.dest, a.metavar)), None)
            message += did_you_mean(wrong[2], map(str, (action and action.choices) or ()))
        super().error(message)

    def _every_option(self) -> Iterator[str]:
        yield from self._option_string_actions
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    yield from parser._option_string_actions
