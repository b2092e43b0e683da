"""The console script ``dmlbench``: hands the command line to the command."""

import ctypes
import importlib
import keyword
import os
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType

_PROCESS = os.getpid()

COMMANDS = {
    "train": "train and test one config at one fold and repeat, or sweep over many with -m",
    "evaluate": "score a finished run again, or a file of embeddings",
    "export": "write a run's model, model card and graphs into a standalone folder",
    "embed": "embed a folder of images with a trained model",
    "import": "check test embeddings of other code, and import them as a config",
    "submit": "check a folder of embeddings as a submission to the tables",
    "aggregate": "summarize the runs of each config (mlrc: 81 collections of fold models)",
    "reproduce": "run the missing runs of a table, and compare with the paper",
    "tune": "tune hyperparameters under protocol=hpo, and write the best trial as a recipe",
    "table": "print aggregated configs side by side; write Markdown, CSV and LaTeX",
    "oodml": "make train-test splits of growing distance, and score and adapt runs on them",
    "study": "run a small experiment of a paper, and check the paper's claims",
    "report": "write an HTML page of aggregated configs, or draw them (--picture)",
    "explain": "draw the pooling weights of a trained model, or the AVSL distance of two images",
    "data": "list, verify and prepare data sets, and count images and classes",
    "status": "list runs with their state: done, running, failed or interrupted",
    "clean": "remove runs that match a pattern, after showing them",
}
_WITH_MODULE, _WITH_WORD = ("train", "reproduce", "tune", "data", "submit"), ("oodml", "study")
"""Commands without a function in ``cli/simple_commands.py``: with a module, or with sub-commands."""
_WITH_NETWORKS = ("train", "embed", "report", "reproduce", "tune", "study")


def usage() -> str:
    """The overview that ``dmlbench --help`` prints."""
    commands = "\n".join(f"  {name:<10} {text}" for name, text in COMMANDS.items())
    return (
        "Compare deep metric learning methods under the protocols of the papers.\n\n"
        f"usage: dmlbench COMMAND [--help] [key=value ...]\n\n{commands}\n\n"
        "example: dmlbench train -m pooling=gap,gsp fold=0,1,2,3 repeat=0,1,2"
    )


def keep_freed_memory() -> None:
    """Keep freed memory in the process: the system would clear pages of the size of feature maps again and again.

    Embedding images took 1.8 times as long. The process holds up to half as much again. Environment variables win, and
    started processes inherit them. For glibc alone.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    for name, parameter, value in (("MALLOC_MMAP_MAX_", -4, 0), ("MALLOC_TRIM_THRESHOLD_", -1, 2**31 - 1)):  # malloc.h
        if mallopt is not None and name not in os.environ:
            os.environ[name] = str(value)
            mallopt(parameter, value)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``dmlbench``; exits with 0, 1 (failed), 2 (bad configuration), 75 (stopped by SIGTERM) or 130 (Ctrl-C)."""
    # Threads that spin while they wait take the cores of other processes: a run beside busy ones took twice as long.
    # OpenMP reads this once, when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        sys.exit(0 if arguments else 2)
    if arguments[0] == "--version":
        from dmlbench import __version__

        print(__version__)
        sys.exit(0)

    # At the top of the file they would make the overview wait for what it does not need, Hydra and numpy.
    from dmlbench.cli import simple_commands
    from dmlbench.cli.arguments import parse
    from dmlbench.cli.errors import guarded
    from dmlbench.cli.hydra_command import run_command
    from dmlbench.types import ConfigError, closest, num_launched

    def action() -> None:
        name, *rest = arguments
        if name not in COMMANDS:
            raise ConfigError(f"command '{name}' is unknown: {closest(name, list(COMMANDS))}")
        if name in _WITH_NETWORKS:
            keep_freed_memory()
        line = parse(name, rest)
        if num_launched() > 1 and (name != "train" or line.is_sweep):
            raise ConfigError(f"torchrun: got {name}{' -m' * line.is_sweep}, expected train without -m.")
        if name in _WITH_MODULE:
            importlib.import_module(f"dmlbench.cli.{name}").main(line)
        elif name in _WITH_WORD:
            getattr(simple_commands, name)(line)
        else:
            run_command(name, getattr(simple_commands, name + "_" * keyword.iskeyword(name)), line)

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _stop)  # a run that trains has a handler of its own
    code = guarded(action)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # an exception while Python ends would print a traceback
    sys.exit(code)


def _stop(number: int, frame: FrameType | None) -> None:
    from dmlbench.training.signals import EXIT_PREEMPTED, Preempted

    if os.getpid() != _PROCESS:  # a worker that was forked
        os._exit(EXIT_PREEMPTED)
    raise Preempted(EXIT_PREEMPTED)


if __name__ == "__main__":
    main()
