"""Prepares a data set: finds or downloads its archives, verifies them, and puts them where they belong."""

import ftplib
import logging
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pooch
from filelock import FileLock, Timeout

from dmlbench.data.getting.archives import Part, extract, read_marker
from dmlbench.data.getting.catalog import Archive, Source, is_found
from dmlbench.runtime import whole_file
from dmlbench.types import DataError

_RETRIES = 3

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """A data set that its reader finds; ``was_there``: nothing had to be done."""

    folder: Path
    layout: str
    was_there: bool


def prepare(
    source: Source,
    root: str | Path,
    *,
    given: Sequence[str | Path] = (),
    password: str | None = None,
    download: bool = True,
    accept_other_checksum: bool = False,
    report: Callable[[str], None] = lambda text: None,
) -> Prepared:
    """Extract the archives found in ``root``, or download them, so that the data set is found below ``root``.

    Args:
        root: the folder of all data sets.
        given: the archives, in any folder and under any name. If empty, the published names are looked for in ``root``
            and its sub-folder of the data set.
        password: of encrypted archives.
        accept_other_checksum: take archives that differ from the published ones; the folder's marker file records it.
        report: called with a line before each piece of work.
    """
    root = Path(os.path.abspath(root))
    place = root / source.name
    found = is_found(source, root) if root.is_dir() else None
    if found is not None and not _is_partial(source, found[0]):
        if source.is_read_packed:
            paths = {path: True for a in source.archives if (path := found[0] / a.name).is_file()}
            _checked(source, paths, accept_other_checksum, report)
        return Prepared(found[0], found[1].description, was_there=True)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f".{source.name}.lock", timeout=0):
            folder = found[0] if found else place
            files = _gather(source, root, folder, [Path(path) for path in given], download)
            parts, other = _checked(source, files, accept_other_checksum, report)
            if source.is_read_packed:
                for part in parts:
                    _copy(part.path, folder / part.path.name, report)
            else:
                notes = {"accepted_other_checksum": ", ".join(other)} if other else {}
                extract(
                    parts, _free_place(place, parts), password=password, notes=notes, report=report,
                    check=lambda folder: _check_layout(source, folder, parts),
                )  # fmt: skip
    except Timeout:
        raise DataError(f"another process prepares '{place}'; start again when it is done") from None
    except OSError as error:
        raise DataError(
            f"cannot prepare '{place}' ({error}); free some space, or set paths.data_dir to a folder you can write"
        ) from error
    folder, layout = source.place.find(root)
    return Prepared(folder, layout.description, was_there=False)


def _is_partial(source: Source, folder: Path) -> bool:
    present = [
        (folder / archive.name).is_file() or (folder / archive.name.split(".")[0]).is_dir()
        for archive in source.alternatives[0]
    ]
    return source.is_read_packed and any(present) and not all(present)


def _gather(source: Source, root: Path, place: Path, given: Sequence[Path], download: bool) -> dict[Path, bool]:
    """The files to use (given, found, or downloaded), and whether each is an archive."""
    for path in given:
        if not path.is_file():
            raise DataError(f"'{path}' is no file; correct archives")
    names = [archive.name for archive in source.archives]
    if other := [path for path in given if path.name not in names]:
        if source.is_read_packed:
            raise DataError(f"'{other[0]}' must have its published name, one of {', '.join(names)}; rename it")
        return {path: path.suffix not in (".mat", ".txt") for path in given}
    files = {name: folder / name for name in names for folder in (place, root) if (folder / name).is_file()}
    files |= {path.name: path for path in given}
    for alternative in source.alternatives:
        needed = {archive.name for archive in alternative}
        if needed <= set(files) and {path.name for path in given} <= needed:
            return {files[archive.name]: archive.is_archive for archive in alternative}
    wanted = next(
        (a for a in source.alternatives if any(archive.name in files for archive in a)), source.alternatives[0]
    )
    missing = [archive for archive in wanted if archive.name not in files]
    if not download or not all(archive.urls for archive in missing):
        there = f"{', '.join(a.name for a in wanted if a.name in files)} is there; " if files else ""
        raise DataError(
            f"{source.title} is not in '{root}', nor is {', '.join(a.name for a in missing)}; {there}{source.by_hand}; "
            f"put it into '{root}' and start again, or name files that lie elsewhere with archives=<file>"
        )
    for archive in missing:
        files[archive.name] = _download(source, archive, place if source.is_read_packed else root)
    return {files[archive.name]: archive.is_archive for archive in wanted}


def _download(source: Source, archive: Archive, folder: Path) -> Path:
    """Download and verify an archive from the first of its links that works."""
    for url in archive.urls:
        downloader = pooch.HTTPDownloader if url.startswith("http") else pooch.FTPDownloader
        files = pooch.create(
            path=folder, base_url="", registry={archive.name: f"md5:{archive.md5}"}, urls={archive.name: url},
            retry_if_failed=_RETRIES,
        )  # fmt: skip
        try:
            return Path(
                files.fetch(archive.name, downloader=downloader(progressbar=sys.stderr.isatty(), chunk_size=1 << 20))
            )
        except (ValueError, OSError, EOFError, ftplib.Error) as error:
            failure = error
    raise DataError(f"cannot download {archive.name} ({failure}); start again later, or {source.by_hand}") from failure


def _checked(
    source: Source, files: Mapping[Path, bool], accept_other_checksum: bool, report: Callable[[str], None]
) -> tuple[list[Part], list[str]]:
    """The files with their checksums, and the names of those that differ from the published ones."""
    by_name = {archive.name: archive for archive in source.archives}
    published = {archive.md5 for archive in source.archives if archive.md5 is not None}
    checked, other = [], []
    for path, is_archive in files.items():
        name = path.name
        report(f"checksum of {name}")
        md5 = pooch.file_hash(str(path), alg="md5")
        checked.append(Part(path, md5, is_archive))
        if md5 in published or not published or (name in by_name and by_name[name].md5 is None):
            continue
        other.append(name)
        if accept_other_checksum:
            logger.warning("%s has md5 %s, which is not published; accepted as requested", path, md5)
            continue
        expected = " and ".join(
            f"{archive.name} has {archive.md5}" + (f" ({archive.size} bytes)" if archive.size else "")
            for archive in ([by_name[name]] if name in by_name else source.alternatives[0])
        )
        raise DataError(
            f"'{path}' has md5 {md5} ({path.stat().st_size} bytes), but the published {expected}; download "
            "it again, or take it as it is with accept_other_checksum=true"
        )
    return checked, other


def _free_place(place: Path, parts: Sequence[Part]) -> Path:
    """The folder to make: the usual one, or one inside it when the user made that for the archives."""
    if not os.path.lexists(place) or read_marker(place) is not None:
        return place
    own = {part.path for part in parts if part.path.parent == place}
    if place.is_dir() and not place.is_symlink() and set(place.iterdir()) - {place / place.name} <= own:
        return place / place.name
    return place  # extract says that it is not ours


def _check_layout(source: Source, folder: Path, parts: Sequence[Part]) -> None:
    if is_found(source, folder) is None:
        names = ", ".join(f"'{part.path}'" for part in parts)
        raise DataError(
            f"{names} holds no layout of {source.title} that is known; expected {source.place.expected}; extract it by "
            "hand and point dataset.table.root at the right folder"
        )


def _copy(path: Path, to: Path, report: Callable[[str], None]) -> None:
    if path == to or (to.exists() and to.samefile(path)):
        return
    if to.exists():
        raise DataError(f"'{to}' exists; move it away and start again")
    to.parent.mkdir(parents=True, exist_ok=True)
    report(f"copying {path.name}")
    with path.open("rb") as source, whole_file(to) as copy:
        shutil.copyfileobj(source, copy, 1 << 20)
