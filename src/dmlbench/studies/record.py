"""The record of a study: parts that are computed once, a table beside the paper's claims, and a figure."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from tqdm import tqdm

from dmlbench import runtime
from dmlbench.apps.pictures import save_figure
from dmlbench.results.table import markdown_lines
from dmlbench.types import ConfigError, IntArray, RunError, check_file_name, check_positive

Float = NDArray[np.float64]

_SCHEMA = 1
_OF_DEVICE = ("gsp_timing",)
"""Studies that measure the device."""
_NO_SETTING = ("name", "device", "paths", "num_workers", "image_cache", "eval_batch_size")
"""Keys of a study's configuration that move no number, or only by rounding."""


@dataclass(frozen=True)
class Claim:
    """A claim of a paper and our finding; ``holds`` is None where the study cannot tell."""

    place: str
    paper: str
    ours: str
    holds: bool | None


@dataclass(frozen=True)
class Findings:
    """The table of a study, the paper's claims, and the figure."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    claims: tuple[Claim, ...]
    notes: tuple[str, ...]
    figure: Figure


class Parts:
    """Results of a study by name, each computed once and kept in a JSON file with the settings that made it."""

    def __init__(self, path: Path, study: str, settings: Mapping[str, Any], *, device: torch.device) -> None:
        self.path, self.device = path, device
        self._content: dict[str, Any] = {
            "schema": _SCHEMA, "study": study, "settings": dict(settings), "bound": {}, "parts": {},
        }  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            return
        try:
            held = runtime.read_json(path)
            then, now = (
                {key: one[key] for key in ("schema", "study")} | one["settings"] for one in (held, self._content)
            )
            self._content |= {key: held[key] for key in ("bound", "parts")}
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(f"{path} is damaged ({error}). Remove it to run the study again.") from error
        pairs = {key: (then.get(key, "nothing"), now.get(key, "nothing")) for key in {**then, **now}}
        if differing := [f"{key}: {a} there, {b} requested" for key, (a, b) in pairs.items() if a != b]:
            raise RunError(
                f"{path} holds a study with other settings ({'; '.join(differing)}). Choose another name=..., or "
                "remove that file."
            )

    def bind(self, *, data: str) -> None:
        """Require that all parts have the same fingerprint of the data."""
        held = self._content["bound"].setdefault("data", data)
        if held != data:
            raise RunError(
                f"{self.path} was made with other data ({held:.16}, now {data:.16}). Choose another name=..., or "
                "remove that file."
            )

    def get(self, names: Sequence[str], compute: Callable[[str], Any], *, describe: str) -> dict[str, Any]:
        """Compute the missing parts, values that JSON can hold; keep each at once, and return all by name."""
        found = self._content["parts"]
        for name in tqdm(names, desc=describe, disable=None, unit="part", leave=False):
            if name not in found:
                started = time.monotonic()
                found[name] = {
                    "value": compute(name),
                    "wall_s": round(time.monotonic() - started, 3),
                    "device": runtime.device_name(self.device),
                    "threads": torch.get_num_threads(),
                    "versions": runtime.package_versions(),
                    "commit": runtime.git_commit(),
                }
                runtime.write_json(self.path, {**self._content, "complete": False})
        return {name: found[name]["value"] for name in names}

    def finish(self, findings: Findings) -> None:
        """Write the complete record."""
        summary = {key: getattr(findings, key) for key in ("title", "heads", "rows", "notes")}
        summary["claims"] = [asdict(claim) for claim in findings.claims]
        summary["wall_s"] = round(sum(part["wall_s"] for part in self._content["parts"].values()), 3)
        runtime.write_json(self.path, {**self._content, **summary, "complete": True})


def conduct_study(study: str, args: Any, conduct: Callable[[Any, Parts], Findings]) -> tuple[Findings, list[Path]]:
    """Compute a study's missing parts, and write record, table and figure under ``<output_dir>/studies``."""
    check_file_name(args.name)
    runtime.set_strict_float32()
    base = Path(args.paths.output_dir) / "studies" / args.name
    device = runtime.select_device(args.device)
    kept = {key: value for key, value in asdict(args).items() if key not in _NO_SETTING}
    if study in _OF_DEVICE:
        kept["device"] = device.type
    for key in ("root", "cache_dir"):  # the same data may lie elsewhere tomorrow; their fingerprint is bound
        kept.get("dataset", {}).get("table", {}).pop(key, None)
    parts = Parts(base.with_name(f"{base.name}.json"), study, kept, device=device)
    findings = conduct(args, parts)
    parts.finish(findings)
    runtime.remove_leftovers(base.parent)
    written = [base.with_name(f"{base.name}{suffix}") for suffix in (".json", ".md", ".csv", ".png")]
    runtime.atomic_write(written[1], to_markdown(findings).encode())
    runtime.atomic_write(written[2], pd.DataFrame(findings.rows, columns=findings.heads).to_csv(index=False).encode())
    save_figure(findings.figure, written[3])
    return findings, written


def require_positive(args: Any, *keys: str) -> None:
    check_positive(**{key: getattr(args, key) for key in keys})


def several_values(args: Any, key: str) -> list[Any]:
    """Two or more positive values of a key, ascending."""
    values = sorted(set(getattr(args, key)))
    if len(values) < 2 or values[0] <= 0:
        raise ConfigError(f"{key}: got {values}, expected two or more positive numbers.")
    return values


def spread(values: Sequence[float] | IntArray, digits: int = 1) -> str:
    """Mean and population std of fractions, in percent."""
    return f"{100 * np.mean(values):.{digits}f} ± {100 * np.std(values):.{digits}f}"


def to_markdown(findings: Findings) -> str:
    """The table, the paper's claims vs. what came out, and the notes."""
    says = {True: "yes", False: "NO", None: "cannot be told"}
    claims = [(claim.place, claim.paper, claim.ours, says[claim.holds]) for claim in findings.claims]
    rows = markdown_lines(findings.heads, findings.rows, "l" + "r" * (len(findings.heads) - 1))
    parts = [f"### {findings.title}", "", *rows, ""]
    parts += [*markdown_lines(("place", "the paper", "here", "comes out"), claims, "llll"), ""]
    return "\n".join([*parts, *(f"- {note}" for note in findings.notes), ""])
