"""What the site has besides the pages of docs/: the published results, the notebook, CONTRIBUTING.md and CHANGELOG.md.

Links between these and the pages hold in the repository and, rewritten, on the site. ``docs_tables.py`` writes the
pages' tables.
"""

import functools
import json
import posixpath
import re
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from markdown.extensions.toc import slugify
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from mkdocs.structure.toc import AnchorLink

ROOT = Path(__file__).resolve().parents[1]
PUBLISHED = "outputs/published"
FINDINGS = "findings.md"
_WIDE = re.compile("^<!-- table: conf/(rerank|loss|pooling) -->$", flags=re.MULTILINE)
_ROWS = re.compile(r"<!-- (?:table: )?(?P<table>\S+) -->|<tr>\n<td><code>[\w.]+</code></td>\n.*?</tr>", flags=re.DOTALL)
FOLDERS = {"avsl": "AVSL", "oodml": "ooDML", "frozen_features_cars196": "Frozen features, Cars196"}
SEARCH_WORDS = {
    "collections.md": ["significance", "p-value"],
    "data.md": ["huggingface"],
    "evaluation.md": ["recall@k"],
    "first_steps.md": ["jupyter"],
    "loggers.md": ["plot", "loss curve"],
    "running.md": ["amp"],
    "several_gpus.md": ["ddp", "multi-gpu"],
    "speed.md": ["data loader", "multi-gpu"],
    "tutorials/fine_tune.md": ["finetune", "finetuning"],
    "tutorials/trained_model.md": ["inference", "similarity search", "state_dict", "visualization"],
    "tutorials/own_loss_or_pooling.md": ["custom loss", "custom pooling"],
}
_titles: dict[str, str] = {}  # of pages, in the navigation
_of_rows: list[dict[str, Any]] = []  # what searches find besides pages and sections


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The footer names the version that the pages describe; the results in the navigation."""
    _of_rows.clear()
    config.copyright = f"dmlbench {version('dmlbench').partition('+')[0]}, {config.copyright}"
    assert config.nav is not None
    _titles.update({page: title for section in config.nav for title, page in _pages(section)})
    index = (ROOT / PUBLISHED / "README.md").read_text()
    folders = re.findall(r"\]\((\w+)/README.md\)", index)
    config.nav[-1]["Results"].append({"Published results": ["published/README.md", *map(_of_folder, folders)]})
    return config


def _pages(entry: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Titles and pages of an entry of the navigation."""
    for title, inside in entry.items():
        if isinstance(inside, str):
            yield title, inside
        else:
            for page in inside:
                yield from _pages(page)


def _of_folder(folder: str) -> dict[str, list[str]]:
    """A folder of results: its README, its findings, then its tables."""
    places = sorted(path.relative_to(ROOT / PUBLISHED) for path in (ROOT / PUBLISHED / folder).rglob("*.md"))
    places.sort(key=lambda place: (place.name != "README.md", place.name != FINDINGS))
    title = FOLDERS.get(folder, folder.replace("_", " ").capitalize())
    return {title: [f"published/{place}" for place in places]}


@functools.cache
def _published_titles() -> Counter[str]:
    """How many published pages have a title."""
    pages = (ROOT / PUBLISHED).rglob("*.md")
    return Counter(page.read_text(encoding="utf-8").partition("\n")[0] for page in pages)


def _part_of(source: str) -> str:
    """What tells a table of published/ from others with its title: <part>[-<data set>-...].md, or its folder."""
    place = Path(source)
    part, *rest = place.stem.split("-")
    return (place.parent.name if len(rest) == 1 else part).replace("_", " ")  # <data set>-<protocol>.md names no part


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Published results, CONTRIBUTING.md and CHANGELOG.md, as if they were in docs/."""
    places = {f"published/{path.relative_to(ROOT / PUBLISHED)}": path
              for path in sorted((ROOT / PUBLISHED).rglob("*")) if path.is_file()}  # fmt: skip
    places |= {"contributing.md": ROOT / "CONTRIBUTING.md", "changelog.md": ROOT / "CHANGELOG.md"}
    for place, path in places.items():
        kind = InclusionLevel.NOT_IN_NAV if place.startswith("published/") else InclusionLevel.UNDEFINED
        files.append(File.generated(config, place, abs_src_path=str(path), inclusion=kind))
    notebook = json.loads((ROOT / "docs" / "first_steps.ipynb").read_text())
    first, *cells = map(_cell, notebook["cells"])
    content = "\n\n".join([first, "[Download the notebook](first_steps.ipynb)", *cells])
    files.append(File.generated(config, "first_steps.md", content=content))
    return files


def _cell(cell: dict[str, Any]) -> str:
    """A cell of a notebook, with its outputs, as Markdown."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return source
    outputs = ["".join(output["data"]["text/plain"]) for output in cell["outputs"]]
    return "\n\n".join([f"```python\n{source}\n```", *(f"```\n{text}\n```" for text in outputs)])


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to what lies beside docs/ in the repository, lists of sections, and pages before results in searches."""
    source = page.file.src_uri
    page.meta["tags"] = SEARCH_WORDS.get(source, [])
    if source.startswith("published/"):  # searches find the READMEs and findings, which link to tables and trials
        is_text = posixpath.basename(source) in ("README.md", FINDINGS)
        page.meta["search"] = {"boost": 0.2} if is_text else {"exclude": True}
        if not is_text:  # a table, whose title is a heading of a lower level
            of = f" ({_part_of(source)})" if _published_titles()[markdown.partition("\n")[0]] > 1 else ""
            results = posixpath.relpath("/".join([*source.split("/")[:2], "README.md"]), posixpath.dirname(source))
            part = f"*Part of [these results]({results}).*"
            markdown = re.sub("^#+ (.*)$", rf"# \1{of}\n\n{part}", markdown, count=1, flags=re.MULTILINE)
    if source == "all_scores.md":
        page.meta["search"] = {"exclude": True}
    if source == "deviations.md":
        page.meta["search"] = {"boost": 0.2}
    if _WIDE.search(markdown):  # no room beside the table
        page.meta["hide"] = ["toc"]
        sections = re.findall("^## (.*)$", markdown, flags=re.MULTILINE)
        links = " · ".join(f"[{title}](#{slugify(title, '-')})" for title in sections)
        markdown = re.sub("^(# .*)$", rf"\1\n\n{links}", markdown, count=1, flags=re.MULTILINE)
    places = {
        "../outputs/published": "published", "../CONTRIBUTING.md": "contributing.md",
        "docs/": "",  # from CONTRIBUTING.md and CHANGELOG.md
        "../../outputs/published": "../published", "../../CONTRIBUTING.md": "../contributing.md",  # from a tutorial
    }  # fmt: skip
    if source != "first_steps.md":
        places["first_steps.ipynb"] = "first_steps.md"
    for place, on_the_site in places.items():
        markdown = markdown.replace(f"]({place}", f"]({on_the_site}")
    folder = posixpath.dirname(source) or "."
    return re.sub(r"`docs/(\w+\.md)`", lambda m: f"[{_titles[m[1]]}]({posixpath.relpath(m[1], folder)})", markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rows of tables of keys, options and metrics are places that searches find."""
    table = ""

    def row(found: re.Match[str]) -> str:
        nonlocal table
        table = found["table"] or table
        kind, _, group = table.partition("/")
        if found["table"] or kind not in ("keys", "conf", "metrics"):
            return found[0]
        first, *cells = [
            re.sub("</?code>", "", cell) for cell in re.findall("<td>(.*?)</td>", found[0], flags=re.DOTALL)
        ]
        if kind == "keys" and len(cells) == 3:  # the options of a group, each with its keys
            title, place = f"{cells[0]} ({group}={first})", f"{first}:{cells[0]}"
        elif kind == "conf":
            title = place = f"{group}={first}"
        else:
            title, place = first if kind == "keys" else f"{first}, {cells[0]}", first
        location = f"{page.file.url}#{place}"
        _of_rows.append({"location": location, "title": title, "text": " ".join(cells), "boost": 0.5})
        return found[0].replace("<tr>", f'<tr id="{place}">', 1)

    return _ROWS.sub(row, html)


def on_post_build(config: MkDocsConfig) -> None:
    """Add the rows of tables to the index of the search."""
    path = Path(config.site_dir, "search", "search_index.json")
    index = json.loads(path.read_text())
    index["docs"] += _of_rows
    path.write_text(json.dumps(index))


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
