"""What the site has besides the pages of docs/: tables made when it is built, the published results, CONTRIBUTING.md.

A line ``<!-- table: conf/loss -->`` of a page becomes the table of that folder's options, made of the heads of their
files; ``metrics``, ``measured`` and ``deviations`` name the others. A head is the comment on top of an option's
file: what it is, then lines ``Key: text``, a key for each further column. Links of pages to ``../outputs/published``
and to ``../CONTRIBUTING.md`` hold in the repository and, rewritten, on the site.
"""

import re
from pathlib import Path

import yaml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

from dmlbench.evaluation.metrics.registry import TABLE
from dmlbench.results.table import summarize_tables

ROOT = Path(__file__).resolve().parents[1]
PUBLISHED = "outputs/published"
COLUMNS = {
    "rerank": {"Formula": "similarity of a pair in a list", "Source": "source"},
    "loss": {"Formula": "of one pair, triplet, proxy or image", "Reduction": "reduction", "Source": "source"},
    "pooling": {"Parameters": "parameters", "Operations": "operations", "Source": "source"},
}
"""Keys that heads of a folder have, and what the columns are called."""

_STYLED = {"Formula": '<span class="formula">{}</span>'}
_MARKER = re.compile(r"^<!-- table: (\S+) -->$", flags=re.MULTILINE)
_KEY = re.compile(r"([A-Z][a-z]+): (.+)")
_OPTION_SET = re.compile(r"(?<![\w`/<=-])((?:[a-z_]+[.@])*[a-z_]+=[\w.,*\[\]'{}$:/<>-]*[\w\]'}>])")
_CODE = re.compile("(`[^`]*`)")


def head(file: Path) -> dict[str, str]:
    """The comment on top of an option's file: its prose under "", its lines ``Key: text`` by the keys of COLUMNS."""
    found: dict[str, str] = {"": ""}
    last = ""
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        text = line.removeprefix("#")
        if text.startswith(" @package"):
            continue
        if (match := _KEY.fullmatch(text.strip())) and match[1] in COLUMNS.get(file.parent.name, ()):
            last = match[1]
            found[last] = match[2]
        else:
            found[last] = f"{found[last]} {text.strip()}".strip()
    return found


def options(group: str) -> dict[str, dict[str, str]]:
    """Heads of all options of a folder of ``conf``, by name.

    Raises:
        PluginError: an option has no head, or lacks a key that its table has a column for.
    """
    found = {file.stem: head(file) for file in sorted((ROOT / "conf" / group).glob("*.yaml"))}
    if not found:
        raise PluginError(f"conf/{group} holds no option; name a folder of conf in <!-- table: conf/... -->")
    for name, texts in found.items():
        missing = {key for key in ("", *COLUMNS.get(group, ())) if not texts.get(key)}
        if missing and name != "none":
            raise PluginError(f"conf/{group}/{name}.yaml: its head lacks {', '.join(sorted(missing)) or 'what it is'}")
    return found


def _cell(text: str) -> str:
    """Markdown of a head's text: what sets an option as code, and all else as it stands."""
    parts = _CODE.split(_OPTION_SET.sub(r"`\1`", text))
    return "".join(p if p.startswith("`") else p.replace("<", "&lt;") for p in parts).replace("|", "\\|")


def _table(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def options_table(group: str) -> str:
    """Markdown of a folder's options: a row each, from their heads."""
    columns = COLUMNS.get(group, {})
    rows = [
        [f"`{name}`", _cell(texts[""]), *(_STYLED.get(key, "{}").format(_cell(texts.get(key, "-"))) for key in columns)]
        for name, texts in options(group).items()
    ]
    return _table([f"`{group}=`", "what it is", *columns.values()], rows)


def metrics_table() -> str:
    """Markdown of all metrics: a row each, from the one table that also computes them."""
    rows = [[f"`{m.name}`", m.label.format(k="K"), _cell(m.formula), _cell(m.source)] for m in TABLE]
    return _table(["metric", "in tables", "what is computed", "source"], rows)


def deviations_tables() -> str:
    """Markdown of what each recipe still differs in from its paper or code: a section and a table for each recipe."""
    sections = []
    for file in sorted((ROOT / "conf/recipe").glob("*.yaml")):
        recipe = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        rows = [
            [_cell(e["text"]), "; ".join(f"`{group}={_listed(v)}`" for group, v in e.get("when", {}).items()) or "all",
             _cell(e["source"])]
            for e in recipe.get("deviations", ())
        ]  # fmt: skip
        if rows:
            sections.append(
                f"## {file.stem} ({recipe['paper']})\n\n{_table(['deviation', 'applies to', 'source'], rows)}"
            )
    return "\n\n".join(sections)


def _listed(options: object) -> str:
    return ",".join(map(str, options)) if isinstance(options, list) else str(options)


def _made(what: str) -> str:
    if what.startswith("conf/"):
        return options_table(what.removeprefix("conf/"))
    if what == "metrics":
        return metrics_table()
    if what == "measured":
        text = summarize_tables(ROOT / PUBLISHED).replace(f"]({ROOT / PUBLISHED}/", "](published/")
        return text.replace(" ± ", "\u00a0±\u00a0")  # a score and its deviation on one line
    if what == "deviations":
        return deviations_tables()
    raise PluginError(f"there is no table '{what}'; name conf/<folder>, metrics, measured or deviations")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Published results and CONTRIBUTING.md, as if they lay in docs/."""
    places = {f"published/{path.relative_to(ROOT / PUBLISHED)}": path
              for path in sorted((ROOT / PUBLISHED).rglob("*")) if path.is_file()}  # fmt: skip
    for place, path in {"contributing.md": ROOT / "CONTRIBUTING.md", **places}.items():
        kind = InclusionLevel.NOT_IN_NAV if place.startswith("published/") else InclusionLevel.UNDEFINED
        files.append(File.generated(config, place, abs_src_path=str(path), inclusion=kind))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Tables in place of their markers, and links to what lies beside docs/ in the repository."""
    if set(_MARKER.findall(markdown)) & {f"conf/{group}" for group in COLUMNS}:
        page.meta["hide"] = ["toc"]  # a wide table takes its place
    for place, on_the_site in (("../outputs/published", "published"), ("../CONTRIBUTING.md", "contributing.md")):
        markdown = markdown.replace(f"]({place}", f"]({on_the_site}")
    return _MARKER.sub(lambda match: _made(match[1]), markdown)
