"""The site: it builds, its search finds the field's words, and a desktop and a phone show its pages whole."""

import base64
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCREENS = {"desktop": (1366, 768), "phone": (390, 844)}
IMPORTANT = ("index", "get-started", "choose", "options", "performance")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

FAULTS = """(() => {
  const faults = [], column = document.querySelector("article").clientWidth
  const rects = (node, start, end) => {
    const range = document.createRange()
    range.setStart(node, start)
    range.setEnd(node, end)
    return [...range.getClientRects()].filter(rect => rect.width > 0)
  }
  const texts = element => {
    const walk = document.createTreeWalker(element, NodeFilter.SHOW_TEXT)
    return Array.from({length: 1e5}, () => walk.nextNode()).filter(node => node)
  }
  if (document.documentElement.scrollWidth > innerWidth) faults.push("the page is wider than the screen")
  for (const code of document.querySelectorAll("article pre > code")) {
    const button = code.closest(".highlight")?.querySelector(".md-code__nav")?.getBoundingClientRect()
    if (innerWidth > 1200 && code.scrollWidth > code.clientWidth) faults.push(`too long: ${code.textContent}`)
    const frame = code.getBoundingClientRect()
    const right = rect => Math.min(rect.right, frame.right)
    const under = rect => right(rect) > button.left && rect.bottom > button.top && rect.top < button.bottom
    if (!button || texts(code).some(node => rects(node, 0, node.length).some(under)))
      faults.push(`under its button: ${code.textContent}`)
  }
  for (const element of document.querySelectorAll("article :not(pre) > code, article td, article th, article h1"))
    for (const node of texts(element)) {
      const code = node.parentElement.closest("code")
      for (const word of node.data.matchAll(code ? /\\S+/g : /[^\\s/\\u2013-]+/g)) {
        const parts = rects(node, word.index, word.index + word[0].length)
        const width = parts.reduce((sum, part) => sum + part.width, 0)
        const lines = new Set(parts.map(part => Math.round(part.top))).size
        if (lines > 1 && width < column - 20) faults.push(`broken: ${word[0]}`)
      }
    }
  return [...new Set(faults)]
})()"""
"""Faults of a page, in a browser. Names in code stay whole unless they are wider than the page; other words break at a
hyphen or slash alone."""


READY = """[...document.querySelectorAll("article .highlight > pre")].every(x => x.querySelector(".md-code__nav"))
  && [...document.querySelectorAll("article table:not([class])")].every(x => x.closest(".md-typeset__scrollwrap"))"""
"""True when the theme's script has added copy buttons and the frames of tables."""


class Browser:
    """Chromium without a window, by the DevTools protocol over two pipes: JSON, each message ended by a zero byte."""

    def __init__(self, profile: Path) -> None:
        reads, self._out = os.pipe()
        self._in, writes = os.pipe()
        command = [CHROMIUM, "--headless", "--no-sandbox", "--hide-scrollbars", "--remote-debugging-pipe"]

        def pipes() -> None:  # Chromium reads commands from 3 and writes answers to 4
            commands, answers = os.dup(reads), os.dup(writes)
            os.dup2(commands, 3)
            os.dup2(answers, 4)

        self._process = subprocess.Popen(
            [*command, f"--user-data-dir={profile}"], preexec_fn=pipes, close_fds=False, stderr=subprocess.DEVNULL
        )
        os.close(reads)
        os.close(writes)
        self._answers = open(self._in, "rb")  # noqa: SIM115
        self._numbers, self._session = itertools.count(), {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}

    def call(self, method: str, **values: Any) -> Any:
        message = {"id": next(self._numbers), "method": method, "params": values, **self._session}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = json.loads(b"".join(iter(lambda: self._answers.read(1), b"\0")))
            if answer.get("id") == message["id"]:
                return answer["result"]

    def evaluate(self, expression: str) -> Any:
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def wait(self, expression: str, seconds: float = 20) -> Any:
        """The value of an expression as soon as it is true."""
        end = time.monotonic() + seconds
        while not (value := self.evaluate(expression)) and time.monotonic() < end:
            time.sleep(0.02)
        return value

    def show(self, page: Path, width: int, height: int, query: str = "") -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Page.navigate", url=f"{page.as_uri()}{query}")
        assert self.wait("document.readyState == 'complete' && document.querySelectorAll('article').length"), page

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        self.call("Browser.close")
        self._process.wait(20)
        self._answers.close()
        os.close(self._out)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no browser: neither chromium nor google-chrome is installed")
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


def searched_as() -> dict[str, list[str]]:
    """The words for which the search is to show a page first, by page."""
    from mkdocs.config import load_config

    return load_config(str(ROOT / "mkdocs.yml")).extra["searched_as"]


@pytest.mark.slow
def test_the_site_shows_the_code(site: Path) -> None:
    pages = {page.stem: page.read_text(encoding="utf-8") for page in site.rglob("*.html")}
    for option in (
        "--mixers",
        "--mamba-state",
        "--fast-weight-attention",
        "--carry-over-state",
        "fast_weight_lm_gpt2_xl",
    ):
        assert f"<code>{option}</code>" in pages["options"]
    assert "dv_t = w_t G_t^T k_t" in pages["derivations"] and "sum_rule" in pages["ops"]
    assert pages["ops"].count("queries, already through the feature map") == 6  # also where `sum_rule` says it
    assert not [name for name, page in pages.items() if "<!-- derivations" in page or "<p>:::" in page]


@pytest.mark.slow
def test_the_index_of_the_search_has_the_words_of_the_field(site: Path) -> None:
    """A page has each of its words as a tag, which counts more than any text, and in its text, where a reader looks."""
    entries = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    expected = searched_as()
    words = {word for page in expected.values() for word in page}
    assert words >= {"linear attention", "KV cache", "SSM", "distillation", "teacher", "gradient accumulation"}
    assert words >= {"mixed precision", "prefill", "batch_first", "state-space model"}
    for page, names in expected.items():
        place = page.replace(".md", ".html")
        parts = [entry for entry in entries if entry["location"].partition("#")[0] == place]
        text = " ".join(f"{entry['title']} {entry['text']}" for entry in parts).casefold()
        assert parts[0]["tags"] == names
        assert [name for name in names if name.casefold() not in text] == [], page


@pytest.mark.slow
def test_the_search_shows_the_right_page_first(site: Path, browser: Browser) -> None:
    for page, names in searched_as().items():
        for name in names:
            browser.show(site / "index.html", *SCREENS["desktop"], query=f"?q={name.replace(' ', '%20')}")
            first = browser.wait("document.querySelector('.md-search-result__link')?.href")
            assert re.sub(r"[?#].*", "", first or "").endswith(f"/{page.replace('.md', '.html')}"), (name, first)


@pytest.mark.slow
@pytest.mark.parametrize("screen", SCREENS)
@pytest.mark.parametrize("name", IMPORTANT)
def test_a_screen_shows_a_page_whole(name: str, screen: str, site: Path, browser: Browser, tmp_path: Path) -> None:
    """Nothing sticks out, no code lies under its copy button, no name is broken. Leaves a screenshot."""
    browser.show(site / f"{name}.html", *SCREENS[screen])
    assert browser.wait(READY)
    browser.screenshot(tmp_path / f"{name}-{screen}.png")
    assert browser.evaluate(FAULTS) == []
