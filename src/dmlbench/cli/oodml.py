"""``dmlbench oodml WORD``: train-test splits of growing distance, and what runs show over them."""

import importlib

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
"""What can be done; ``conf/oodml_<word>.yaml`` configures it, ``task`` of ``cli/oodml_<word>.py`` does it."""


def main(line: CommandLine) -> None:
    unknown = f"say what to do: dmlbench oodml {'|'.join(WORDS)}; '{{}}' is none of these"
    chosen = first_word(line, WORDS, usage="oodml WORD", unknown=unknown)
    if chosen is not None:
        name = f"oodml_{chosen[0]}"
        run_command(name, importlib.import_module(f"dmlbench.cli.{name}").task, chosen[1])
