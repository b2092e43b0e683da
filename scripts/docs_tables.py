"""Write the parts of docs/ that are made of other files: between ``<!-- table: conf/loss -->`` and ``<!-- end -->``.

``conf/loss`` stands for the options of that folder, made of the heads of their files; ``keys/fit/short`` for the keys
of an option and ``keys/loss`` for those of all options, made of the comments beside them; ``metrics``, ``measured`` and
``deviations`` name the other tables. A head is the comment on top of an option's file: a description, then lines
``Key: text``, a key for each further column.
``<!-- api: dmlbench.run -->`` stands for the signature and docstring of a function or class. `make docs` runs this; a
test fails while a part is out of date.
"""

import functools
import re
from pathlib import Path
from typing import Any

import griffe
import yaml

from dmlbench.evaluation.metrics.registry import TABLE
from dmlbench.results.table import summarize_tables

ROOT = Path(__file__).resolve().parents[1]
PUBLISHED = "outputs/published"
COLUMNS = {
    "rerank": {"Formula": "similarity of query and neighbor", "Source": "source"},
    "loss": {"Formula": "formula (pair, triplet, proxy or image)", "Reduction": "reduction", "Source": "source"},
    "pooling": {"Parameters": "parameters", "Operations": "operations", "Source": "source"},
}
"""Keys that heads of a folder have, and what the columns are called."""

_STYLED = {"Formula": '<span class="formula">{}</span>'}
MARKED = re.compile(r"^<!-- (table|api): (\S+) -->\n.*?^<!-- end -->$", flags=re.MULTILINE | re.DOTALL)
_KEY = re.compile(r"([A-Z][a-z]+): (.+)")
_OPTION_SET = re.compile(r"`[^`]*`|(?<![\w`/<=-])((?:[a-z_]+[.@])*[a-z_]+=[\w.,*\[\]'{}$:/<>-]*[\w\]'}>])")
_CODE = re.compile("(`[^`]*`)")
_KEY_LINE = re.compile(r"( *)([A-Za-z]\w*):(?: +(.+?))??(?: +# *(.+))?")
_FIXED = re.compile(r"(?:distance|reducer): .*|\w+: \$\{(?:runtime|head|pooling)\..*")
"""Keys that a table leaves out: parts of a loss's definition, and sizes that follow from other groups."""


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
        ValueError: an option has no head, or lacks a key that its table has a column for.
    """
    found = {file.stem: head(file) for file in sorted((ROOT / "conf" / group).glob("*.yaml"))}
    if not found:
        raise ValueError(f"conf/{group} holds no option; name a folder of conf in <!-- table: conf/... -->")
    for name, texts in found.items():
        missing = {key for key in ("", *COLUMNS.get(group, ())) if not texts.get(key)}
        if missing and name != "none":
            raise ValueError(f"conf/{group}/{name}.yaml: its head lacks {', '.join(sorted(missing)) or 'its text'}")
    return found


def _cell(text: str) -> str:
    """Markdown of a head's text: what sets an option as code, and all else as it stands."""
    parts = _CODE.split(_OPTION_SET.sub(lambda found: f"`{found[1]}`" if found[1] else found[0], text))
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
    return _table([f"`{group}=`", "description", *columns.values()], rows)


def keys_table(name: str) -> str:
    """Markdown of the keys in ``conf/<name>.yaml``, or in all files of the folder ``conf/<name>``, a row each.

    Raises:
        ValueError: a key of an option has no comment.
    """
    columns = ["key", "default", "meaning"]
    if not (folder := ROOT / "conf" / name).is_dir():
        return _table(columns, _keys(name))
    names = [file.stem for file in sorted(folder.glob("*.yaml")) if file.stem != "none"]
    rows = [[f"`{option}`", *row] for option in names for row in _keys(f"{name}/{option}")]
    return _table([f"`{name}=`", *columns], rows)


def _keys(option: str) -> list[list[str]]:
    """Keys of ``conf/<option>.yaml`` with their default and the comment beside it.

    Keys of a command's own file without a comment are left out: they set up Hydra.
    """
    group = option.rpartition("/")[0]
    parents: list[str] = []
    rows = []
    for line in (ROOT / f"conf/{option}.yaml").read_text(encoding="utf-8").splitlines():
        if not (found := _KEY_LINE.fullmatch(line)) or _FIXED.fullmatch(line.strip()):
            continue
        indent, key, default, meaning = found.groups()
        parents = [*parents[: len(indent) // 2], key]
        if default and meaning:
            rows.append([f"`{'.'.join([*filter(None, [group]), *parents])}`", f"`{default}`", _cell(meaning)])
        elif default and group:
            raise ValueError(f"conf/{option}.yaml: {key} has no comment beside it")
    return rows


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
    return ",".join("none" if o is None else str(o) for o in (options if isinstance(options, list) else [options]))


@functools.cache
def _package() -> Any:
    options = {"returns_multiple_items": False, "warnings": False}
    return griffe.load("dmlbench", search_paths=[ROOT / "src"], docstring_parser="google", docstring_options=options)


def api(path: str) -> str:
    """Markdown of a function or class by the path that imports it, methods with docstrings included."""
    found = _package()[path.removeprefix("dmlbench.")]
    signature = _signature(path.rpartition(".")[2], found)
    is_called = found.is_function or "()" not in signature
    sections = [f"### `{path}`", *([signature] if is_called else []), *_docstring(found)]
    for member in found.members.values() if found.is_class else ():
        if member.has_docstring and not member.name.startswith("_"):
            named = f"{found.name}.{member.name}"
            sections += [f"#### `{named}`", *([_signature(named, member)] if member.is_function else [])]
            sections += _docstring(member)
    return "\n\n".join(sections)


def _signature(name: str, found: Any) -> str:
    arguments: list[str] = []
    for each in getattr(found, "parameters", ()):  # griffe takes functions behind @cache for properties
        if each.name in ("self", "cls"):
            continue
        star = {"variadic positional": "*", "variadic keyword": "**"}.get(each.kind.value, "")
        keywords_begin = each.kind.value == "keyword-only" and not any(a.startswith("*") for a in arguments)
        default = "" if each.default is None or star else f" = {each.default}"
        note = f": {each.annotation}" if each.annotation else ""
        arguments += [*(["*"] if keywords_begin else []), f"{star}{each.name}{note}{default}"]
    returned = None if found.is_class else found.annotation
    result = f" -> {returned}" if returned else ""
    line = f"{name}({', '.join(arguments)}){result}"
    if len(line) > 100:
        line = f"{name}(\n" + "".join(f"    {a},\n" for a in arguments) + f"){result}"
    return f"```\n{line}\n```"


def _docstring(found: Any) -> list[str]:
    titles = {"parameters": "Arguments:", "attributes": "Attributes:", "raises": "Raises:"}
    parts = []
    for section in found.docstring.parsed if found.docstring else ():
        kind = section.kind.value
        if kind == "text":
            parts.append(section.value)
        elif kind == "returns":
            parts.append("Returns: " + " ".join(section.value[0].description.split()))
        elif kind == "admonition":
            kind, title = section.value.kind.capitalize(), section.title  # griffe's title is the text's first line
            text = section.value.contents if title == kind else f"{title} {section.value.contents}"
            parts.append(f"{kind}: " + " ".join(text.split()))
        elif kind in titles:
            items = [(getattr(i, "name", None) or i.annotation, " ".join(i.description.split())) for i in section.value]
            if wrong := [name for name, _ in items if not str(name).isidentifier()]:
                raise ValueError(f"{found.path}: its docstring describes {wrong[0]}, expected one name a line")
            parts.append(titles[kind] + "\n\n" + "\n".join(f"- `{name}`: {text}" for name, text in items))
        else:
            raise ValueError(f"{found.path}: its docstring has a section of {kind}, which nothing writes")
    return [part.replace("``", "`") for part in parts]


def _made(kind: str, what: str) -> str:
    if kind == "api":
        return api(what)
    if what.startswith("conf/"):
        return options_table(what.removeprefix("conf/"))
    if what.startswith("keys/"):
        return keys_table(what.removeprefix("keys/"))
    if what == "metrics":
        return metrics_table()
    if what == "measured":
        text = summarize_tables(ROOT / PUBLISHED).replace(f"]({ROOT / PUBLISHED}/", f"](../{PUBLISHED}/")
        return text.replace(" ± ", "\u00a0±\u00a0")  # a score and its deviation on one line
    if what == "deviations":
        return deviations_tables()
    raise ValueError(
        f"there is no table '{what}'; name conf/<folder>, keys/<folder>, keys/<folder>/<option>, "
        "metrics, measured or deviations"
    )


def with_tables(markdown: str) -> str:
    """A page with its tables and its API as they are now."""
    return MARKED.sub(lambda m: f"<!-- {m[1]}: {m[2]} -->\n\n{_made(m[1], m[2])}\n\n<!-- end -->", markdown)


if __name__ == "__main__":
    for page in (ROOT / "docs").rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        if (new := with_tables(text)) != text:
            page.write_text(new, encoding="utf-8")
            print(f"{page.relative_to(ROOT)}: written")
