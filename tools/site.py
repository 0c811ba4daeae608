"""
Files of the site that `make docs` builds: the repository's pages, and a page of each API.

mkdocs calls `on_files` and `on_page_markdown`, and griffe calls `Doctests`. Both programs run in
the environment `.docs`, which has no torch.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from griffe import Extension, Object
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]

PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "ADR/*.md", "tests/README.md", "docs/**/*.*")

APIS = {
    "api/packplan.md": ("packplan", "The library without torch: `import packplan as pp`."),
    "api/hf.md": ("packplan.hf", "Packing in trainers of transformers and TRL, and in loops. It needs the extra `hf`."),
    "api/testing.md": ("packplan.testing", "Assertions for your own tests. They need the extra `hf`."),
}
"""Page -> the module whose public names it documents, and its first sentence."""

PARTS = "api/parts.md"
"""Page of names that the guides import from deeper modules."""

STYLE = ".md-grid { max-width: 76rem } .md-typeset pre > code { font-size: 0.78em }"
"""CSS for wider pages and smaller code, so that long lines of code and of printed tables fit."""

IMPORT = re.compile(r"^from (packplan\.(?:core|adapters)\.[\w.]+) import ([\w, ]+)$", re.MULTILINE)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """
    Return the theme's files, the repository's pages, and the pages of each API. The repository's
    pages keep their paths, so that links between them work.
    """
    found = {path.relative_to(ROOT).as_posix(): path for place in PAGES for path in ROOT.glob(place)}
    chosen = [file for file in files if not (Path(config.docs_dir) / file.src_uri).exists()]  # the theme's
    chosen += [File.generated(config, name, abs_src_path=str(path)) for name, path in sorted(found.items())]
    made = [("api/site.css", STYLE), *yield_apis()]
    chosen += [File.generated(config, name, content=content) for name, content in made]
    return Files(chosen)


def on_page_markdown(markdown: str, *, page: Page, **_: object) -> str:
    """Keep decisions out of the search, and rank the changes and the pages for contributors low."""
    name = page.file.src_uri
    if name.startswith("ADR/0"):
        page.meta["search"] = {"exclude": True}
    elif not name.startswith(("README", "docs/", "api/")):
        page.meta["search"] = {"boost": 0.5}
    return markdown


def yield_apis() -> Iterator[tuple[str, str]]:
    """Yield the path and the Markdown of each page of the API."""
    for name, (module, sentence) in APIS.items():
        lines = [f"::: {module}.{one}" for one in sorted(public_names(module), key=str.swapcase)]  # functions first
        yield name, "\n\n".join([f"# {module}", sentence, *lines])
    shown = "\n".join(path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("docs/**/*.md")))
    parts = {f"{module}.{one.strip()}" for module, names in IMPORT.findall(shown) for one in names.split(",")}
    lines = [f"::: {one}\n    options: {{show_root_full_path: true}}" for one in sorted(parts)]
    yield PARTS, "\n\n".join(["# packplan.core and packplan.adapters", "Names that the guides import.", *lines])


def public_names(module: str) -> list[str]:
    """
    Return the names of a module's `__all__`, or those that `packplan` loads when they are used.

    Nothing is imported.
    """
    path = ROOT / Path(*module.split("."))
    tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8"))
    assigned = {ast.unparse(one.targets[0]): one.value for one in tree.body if isinstance(one, ast.Assign)}
    if isinstance(assigned["__all__"], ast.List):
        return list(ast.literal_eval(assigned["__all__"]))
    guarded = [one for part in tree.body if isinstance(part, ast.If) for one in part.body]
    return [alias.name for one in guarded if isinstance(one, ast.ImportFrom) for alias in one.names]


class Doctests(Extension):
    """Extension of griffe that shows the doctests in docstrings as code."""

    def on_instance(self, *, obj: Object, **_: object) -> None:
        """Put a fence around each paragraph of a docstring that is an example."""
        if obj.docstring:
            text = f"{obj.docstring.value}\n"
            obj.docstring.value = re.sub(r"(?m)^(>{3} (?:.+\n)+)", r"```pycon\n\1```\n", text)
