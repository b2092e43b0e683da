"""What the site has besides the pages of docs/: the published results, the notebook, CONTRIBUTING.md and CHANGELOG.md.

Links between these and the pages hold in the repository and, rewritten, on the site. ``docs_tables.py`` writes the
pages' tables.
"""

import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from mkdocs.structure.toc import AnchorLink

ROOT = Path(__file__).resolve().parents[1]
PUBLISHED = "outputs/published"
_WIDE = re.compile("^<!-- table: conf/(rerank|loss|pooling) -->$", flags=re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The footer names the version that the pages describe."""
    config.copyright = f"dmlbench {version('dmlbench').partition('+')[0]}, {config.copyright}"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Published results, CONTRIBUTING.md and CHANGELOG.md, as if they were in docs/."""
    places = {f"published/{path.relative_to(ROOT / PUBLISHED)}": path
              for path in sorted((ROOT / PUBLISHED).rglob("*")) if path.is_file()}  # fmt: skip
    places |= {"contributing.md": ROOT / "CONTRIBUTING.md", "changelog.md": ROOT / "CHANGELOG.md"}
    for place, path in places.items():
        kind = InclusionLevel.NOT_IN_NAV if place.startswith("published/") else InclusionLevel.UNDEFINED
        files.append(File.generated(config, place, abs_src_path=str(path), inclusion=kind))
    notebook = json.loads((ROOT / "docs" / "first_steps.ipynb").read_text())
    files.append(File.generated(config, "first_steps.md", content="\n\n".join(map(_cell, notebook["cells"]))))
    return files


def _cell(cell: dict[str, Any]) -> str:
    """A cell of a notebook, with its outputs, as Markdown."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return source
    outputs = ["".join(output["data"]["text/plain"]) for output in cell["outputs"]]
    return "\n\n".join([f"```python\n{source}\n```", *(f"```\n{text}\n```" for text in outputs)])


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to what lies beside docs/ in the repository, room for wide tables, and pages before results in searches."""
    if page.file.src_uri.startswith("published/"):  # searches find the READMEs, which link to tables and trials
        page.meta["search"] = {"boost": 0.2} if page.file.src_uri.endswith("/README.md") else {"exclude": True}
    if _WIDE.search(markdown):
        page.meta["hide"] = ["toc"]
    places = {
        "../outputs/published": "published", "../CONTRIBUTING.md": "contributing.md",
        "first_steps.ipynb": "first_steps.md",
        "docs/": "",  # from CONTRIBUTING.md and CHANGELOG.md
        "../../outputs/published": "../published",  # from a tutorial
    }  # fmt: skip
    for place, on_the_site in places.items():
        markdown = markdown.replace(f"]({place}", f"]({on_the_site}")
    return markdown


def on_page_context(context: dict[str, Any], page: Page, config: MkDocsConfig, nav: Any) -> None:
    """The table of contents of the Python page shows names without their modules, which it has no room for."""
    if page.file.src_uri == "python.md":
        _shorten(page.toc.items)


def _shorten(entries: list[AnchorLink]) -> None:
    for entry in entries:
        entry.title = (
            entry.title.removeprefix("dmlbench.").rpartition(".")[2] if " " not in entry.title else entry.title
        )
        _shorten(entry.children)
