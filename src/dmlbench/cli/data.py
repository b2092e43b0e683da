"""``dmlbench data``: list the data sets, count one, verify its images, or prepare it."""

import dataclasses
import shlex
import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from dmlbench.cli.arguments import CommandLine
from dmlbench.cli.hydra_command import run_command
from dmlbench.config import config_folders, key_of, listed
from dmlbench.types import ConfigError, DataError, ImageTable, closest, counted

_COMMANDS = ("list", "stats", "verify", "prepare")
_OF_PREPARE = ("dataset", "archives", "password", "download", "accept_other_checksum")
"""Keys that the suggested next command does not repeat."""


def main(line: CommandLine) -> None:
    command, *names = line.words or ("",)
    if command not in _COMMANDS and not line.help:
        unknown = f"got '{command}', " if command else ""
        raise ConfigError(f"dmlbench data: {unknown}expected one of {', '.join(_COMMANDS)}.")
    names += [override.partition("=")[2] for override in line.overrides if override.startswith("dataset=")]
    if len(names) != (command != "list") and not line.help:
        wanted = "no name" if command == "list" else "the name of one data set"
        raise ConfigError(
            f"dmlbench data {command}: got {counted(len(names), 'name')}, expected {wanted}. List all with "
            "`dmlbench data list`."
        )
    known = sorted(_files(line.config_dir))
    for name in names:
        if name not in known:
            raise ConfigError(f"data set '{name}' is unknown: {closest(name, known)}")

    def task(args: Any) -> None:
        if command == "list":
            _list(args, line.config_dir)
        elif command == "stats":
            _load(args, names[0])
        elif command == "verify":
            _verify(args, names[0])
        else:
            _prepare(args, names[0], [override for override in line.overrides if key_of(override) not in _OF_PREPARE])

    chosen = [override for override in line.overrides if not override.startswith("dataset=")]
    overrides = (*(f"dataset={name}" for name in names), *chosen)
    run_command("data", task, dataclasses.replace(line, words=(), overrides=overrides))


def _files(config_dir: Path | None) -> dict[str, Path]:
    folders = reversed(config_folders(config_dir))
    return {path.stem: path for folder in folders for path in sorted((folder / "dataset").glob("*.yaml"))}


def _list(args: Any, config_dir: Path | None) -> None:
    from dmlbench.data.preparation.catalog import SOURCES

    root = Path(args.paths.data_dir)
    files = _files(config_dir)
    width = max(map(len, files))
    for name, file in sorted(files.items()):
        comment = takewhile(lambda line: line.startswith("#"), file.read_text(encoding="utf-8").splitlines())
        lines = [f"{name:<{width}} {' '.join(line.lstrip('# ') for line in comment)}"]
        if (source := SOURCES.get(name)) is not None:
            if (found := source.found(root)) is None:
                lines += [f"not found in {root}"]
            else:
                lines += [f"found in {found[0]}: {found[1].description}"]
                try:
                    notes = source.notes(root)
                    lines += [f"NOT AS PUBLISHED: {'; '.join(notes)}"] * bool(notes)
                except DataError as error:
                    lines += [f"cannot be read: {error}"]
            lines += [f"published: {source.published}"]
        print(f"\n{'':<{width}} ".join(lines))
    print(f"\nLooked in {root.absolute()} (paths.data_dir, DMLBENCH_DATA). `dmlbench data prepare NAME` fetches one.")


def _load(args: Any, name: str) -> ImageTable:
    """Read and describe a data set; where it is not there at all, the error also says how to get it."""
    from dmlbench.data.preparation.catalog import SOURCES
    from dmlbench.data.preparation.verify import described
    from dmlbench.identity import read_table

    source = SOURCES.get(name)
    if source is not None and "root" in args.dataset["table"]:
        try:
            source.find(args.dataset["table"]["root"])
        except DataError as error:
            downloads = all(map(source.links, source.alternatives[0]))
            how = "downloads it" if downloads else "extracts the archives after you download them"
            raise DataError(
                f"{error}\n  `dmlbench data prepare {name}` {how}. By hand: {source.by_hand}.\n"
                f"  Terms: {source.terms}. Cite: {source.citation}."
            ) from None
    table = read_table(args.dataset["table"])
    print("\n".join(described(table)))
    return table


def _verify(args: Any, name: str) -> None:
    from tqdm import tqdm

    from dmlbench.data.image_table import counts_by_role
    from dmlbench.data.preparation.catalog import SOURCES
    from dmlbench.data.preparation.verify import Report, findings, unlisted, unusable, verdict, verify
    from dmlbench.data.published_images import deviations_of_sample
    from dmlbench.runtime import available_cores

    table = _load(args, name)
    counts, num_published = "unknown", 0
    if name in SOURCES:
        expected = SOURCES[name].published
        num_published = expected.num_images
        counts = "published" if counts_by_role(table.labels, table.role) == dict(expected.by_role) else "others"
        print(f"  published: {expected}" + ("" if counts == "published" else " (your copy differs)"))
    # A loader that insisted on the counts of what it found may have found a part of the benchmark.
    is_part = any(note.startswith("a subset") for note in table.notes)
    if counts != "published" and args.dataset["table"].get("check_counts") is True and not is_part:
        counts = "as asked"
    sys.stdout.flush()
    has_list = args.dataset["table"].get("csv") is not None  # others share their root with other data sets
    if args.decode:
        bar: Any = tqdm(total=len(table), desc=f"{name}: images", unit="image", disable=None, leave=False)
        with bar:
            report = verify(table, num_threads=args.jobs or available_cores(), watch=bar.update, whole_root=has_list)
    else:
        found = deviations_of_sample(table.root, table.paths.tolist(), table.originals) if table.originals else ()
        report = Report(deviations=found, unlisted=tuple(unlisted(table, whole_root=has_list)))
    print("\n".join(findings(report)))
    print(verdict(report, counts, num_images=len(table), num_published=num_published))
    if reason := unusable(table):
        print(reason)
    if report.broken or reason:
        sys.exit(1)


def _prepare(args: Any, name: str, overrides: Sequence[str]) -> None:
    from dmlbench.data.preparation.catalog import SOURCES
    from dmlbench.data.preparation.prepare import prepare

    source = SOURCES.get(name)
    if source is None:
        raise ConfigError(f"dmlbench data prepare: got {name}, expected one of {', '.join(sorted(SOURCES))}.")
    given = [str(file) for file in listed(args.archives) if file is not None]
    print(f"{source.title}, {source.home}\n  terms: {source.terms}\n  cite: {source.citation}")
    prepared = prepare(
        source, args.dataset["table"]["root"], given=given, password=args.password, download=args.download,
        accept_other_checksum=args.accept_other_checksum,
        report=lambda text: print(f"  {text}", flush=True),
    )  # fmt: skip
    print(f"  {'already prepared' if prepared.was_there else 'made'}: {prepared.folder} ({prepared.layout})")
    _load(args, name)
    print("next: " + shlex.join(["dmlbench", "data", "verify", name, *overrides]))
