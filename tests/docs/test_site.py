"""The site that `make docs` builds: whole, without other hosts, and readable on a phone."""

import json
import os
import re
import shutil
import subprocess
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote

import pytest

from tests.processes import ROOT

DOCS = ROOT / ".docs"

BROWSER = shutil.which("chromium")

PAGES = ("index.html", "docs/tutorial.html", "api/packplan.html")
"""The widest pages: tables and code, output of commands, signatures."""

WIDTHS = (390, 1200)

FRAMES = """
<title>running</title>
<body></body>
<script>
const cases = CASES, found = [];
cases.forEach(([page, width]) => {
  const frame = document.createElement("iframe");
  Object.assign(frame, {width, height: 800, src: page});
  frame.onload = () => {
    const {scrollWidth, clientWidth} = frame.contentDocument.documentElement;
    found.push([page, width, scrollWidth - clientWidth]);
    if (found.length === cases.length) document.body.textContent = "found:" + JSON.stringify(found) + ":end";
  };
  document.body.append(frame);
});
</script>
"""
"""A page that shows others in frames, and prints how much wider than its frame each is."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Build the site, where its environment is set up; SITE names one that is built."""
    folder = tmp_path_factory.mktemp("site")
    if built := os.environ.get("SITE"):
        return shutil.copytree(ROOT / built, folder, dirs_exist_ok=True)
    if not (DOCS / ".ready").exists():
        pytest.skip("the environment of the site is not set up: make docs")
    command = [str(DOCS / "bin" / "python"), "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert (0, "") == (built.returncode, built.stdout + built.stderr)
    return folder


class Server(ThreadingHTTPServer):
    """Takes as many connections at once as a browser opens for all frames."""

    request_queue_size = 128


class Quiet(SimpleHTTPRequestHandler):
    """Logs no request."""

    def log_message(self, *_):
        """Log nothing."""


@pytest.fixture
def served(site):
    """Serve the site on a port of this machine; return its address."""
    with Server(("127.0.0.1", 0), partial(Quiet, directory=site)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class Links(HTMLParser):
    """Collects what a page refers to, and its anchors."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors = {""}
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.anchors.add(values.get("id"))
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        if tag in {"script", "link", "img", "iframe"}:
            self.loaded += [values[name] for name in ("src", "href") if values.get(name)]


def test_no_link_of_the_site_is_broken(site):
    """Files and anchors are there; scripts, styles and pictures are the site's own."""
    pages = {page: Links(page) for page in site.rglob("*.html") if page.name != "404.html"}
    broken = []
    for page, found in pages.items():
        for link in {*found.links, *found.loaded}:
            path, _, anchor = unquote(link).partition("#")
            target = (page.parent / path).resolve() if path else page
            outside = bool(re.match(r"https?:", link))
            if outside:
                broken += [(page.name, link)] * (link in found.loaded)
            elif not target.exists() or (target in pages and anchor not in pages[target].anchors):
                broken.append((page.name, link))

    assert len(pages) > 60
    assert [] == broken


def test_the_site_documents_every_public_name(site):
    """Of the library, of its trainers, of its assertions."""
    import packplan
    import packplan.hf
    import packplan.testing

    for page, module in (("packplan", packplan), ("hf", packplan.hf), ("testing", packplan.testing)):
        anchors = Links(site / "api" / f"{page}.html").anchors
        assert [] == [name for name in module.__all__ if f"{module.__name__}.{name}" not in anchors]
    assert "&gt;&gt;&gt;" in (site / "api" / "packplan.html").read_text(encoding="utf-8"), "examples are code"


def test_the_search_finds_pages_and_no_decisions(site):
    """Decisions would stand before the guides; changes and contributors' pages rank low."""
    found = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]

    assert [] == [one["location"] for one in found if one["location"].startswith("ADR/0")]
    low = {one["location"].partition("#")[0] for one in found if "boost" in one}
    assert low >= {"ADR/index.html", "CHANGELOG.html", "CONTRIBUTING.html"}
    assert not low & {"index.html", "docs/use-it-in/torch.html"}


def test_pages_fit_a_phone_and_a_screen(site, served, tmp_path):
    """Nothing scrolls sideways but wide code and tables by themselves; the console has no line."""
    if BROWSER is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    cases = [(page, width) for page in PAGES for width in WIDTHS]
    (site / "frames.html").write_text(FRAMES.replace("CASES", json.dumps(cases)), encoding="utf-8")
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr",
        f"--user-data-dir={tmp_path}", "--dump-dom", f"{served}/frames.html",
    ]  # fmt: skip
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)

    (found,) = re.findall(r"found:(.*?):end", re.sub(r"(?s)<script>.*?</script>", "", shown.stdout))
    assert sorted([page, width, 0] for page, width in cases) == sorted(json.loads(found))
    assert [] == [line for line in shown.stderr.splitlines() if "CONSOLE" in line]
