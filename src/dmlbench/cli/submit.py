"""``dmlbench submit check``: check a folder of somebody else's embeddings, and take it into the tables."""

import dataclasses
from pathlib import Path
from typing import Any

from dmlbench.cli.arguments import CommandLine
from dmlbench.cli.hydra_command import run_command
from dmlbench.config import key_of
from dmlbench.types import ConfigError, DmlbenchError, RunError, counted

_USAGE = """usage: dmlbench submit check FOLDER [key=value ...]

Check a folder with submission.yaml and a file of test embeddings for each fold and repeat; score it, and take it into
the tables beside other configs, marked as imported, its training not verified.

  dmlbench submit check my_method
  dmlbench submit check my_method paths.data_dir=/data paths.output_dir=outputs

0: accepted; 1: rejected, with the reason. docs/leaderboard.md has an example. Other values are those of `dmlbench
import`."""

_OF_SUBMISSION = {
    *("name", "embeddings", "labels", "gallery", "gallery_labels", "trained", "selected", "allow_partial"),
    *("dataset", "protocol"),
}
"""Keys of ``dmlbench import`` that a submission decides."""


def main(line: CommandLine) -> None:
    if line.help:
        print(_USAGE)
        return
    if len(line.words) != 2 or line.words[0] != "check":
        raise ConfigError(f"dmlbench submit: got '{' '.join(line.words)}', expected check FOLDER.")
    from dmlbench.apps.submission import check_submission, read_submission

    if own := next((key for key in map(key_of, line.overrides) if key in _OF_SUBMISSION), None):
        raise ConfigError(f"{own}: comes from the submission's folder. Leave it out.")
    folder = Path(line.words[1])
    submission = read_submission(folder)

    def task(args: Any) -> None:
        try:
            checked = check_submission(args, submission, folder)
        except DmlbenchError as error:
            raise RunError(f"rejected: {error}") from None
        print(f"accepted: {counted(len(checked.imported.scores), 'file')}; training not verified")
        for flag in checked.flags:
            print(f"  IMPLAUSIBLE: {flag}")
        for note in checked.imported.notes:
            print(f"  {note}")
        print(
            f"written: {checked.imported.config}; `dmlbench aggregate` and `dmlbench table` treat it like any other "
            "config"
        )

    overrides = (f"dataset={submission.dataset}", f"protocol={submission.protocol}", *line.overrides)
    run_command("import", task, dataclasses.replace(line, words=(), overrides=overrides))
