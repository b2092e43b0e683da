"""``dmlbench oodml WORD``: train-test splits of growing distance, and the runs over them."""

import functools
import importlib

from omegaconf import DictConfig

from dmlbench.cli.arguments import CommandLine
from dmlbench.cli.command import first_word, run_command

WORDS = {
    "splits": "exchange and remove classes for train-test splits of growing distance; a file for protocol=oodml",
    "distances": "measure the splits of a file by a network, beside the distances that the file gives",
    "scores": "scores of configs over the distance of their splits, and the area under them",
    "frozen": "score a network's features as they are over the splits of a file",
    "transfer": "test trained models on another data set",
    "few_shot": "adapt the last layer of finished runs to a few images of each test class; scores before and after",
    "structure": "measure how training embeddings are arranged, and whether that goes along with test scores",
}
"""Sub-commands, configured by ``conf/oodml_<word>.yaml``."""
_FUNCTIONS = {
    "splits": "splits.make_splits",
    "distances": "distances.measure",
    "scores": "scores.scores_over_distance",
    "frozen": "distances.frozen",
    "transfer": "distances.transfer",
    "few_shot": "few_shot_table.few_shot",
    "structure": "structure.correlate",
}
"""Functions of ``dmlbench.oodml`` from a configuration to the lines to print."""


def main(line: CommandLine) -> None:
    unknown = f"say what to do: dmlbench oodml {'|'.join(WORDS)}; '{{}}' is none of these"
    chosen = first_word(line, WORDS, usage="oodml WORD", unknown=unknown)
    if chosen is not None:
        run_command(f"oodml_{chosen[0]}", functools.partial(task, chosen[0]), chosen[1])


def task(word: str, cfg: DictConfig) -> None:
    module, _, name = _FUNCTIONS[word].partition(".")
    for line in getattr(importlib.import_module(f"dmlbench.oodml.{module}"), name)(cfg):
        print(line)
