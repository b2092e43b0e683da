"""``dmlbench study NAME``: run a paper's small-scale study and compare with its claims."""

import functools
import importlib

from omegaconf import DictConfig

from dmlbench.cli.arguments import CommandLine
from dmlbench.cli.command import first_word, run_command
from dmlbench.types import ConfigError

STUDIES = {
    "two_moons": "what the temperature does to the boundary of a softmax classifier (ProxyNCA++, figure 3)",
    "gsp_timing": "what GSP's transport costs, with both solvers (GSP, figures 7 left, 8 and 9)",
    "xml_prototypes": "prototypes in place of averages, and whether they serve other classes (XML, figures 3 and 4)",
    "gsp_tokens": "average pooling and GSP on bags of trainable tokens (GSP, figure 3a)",
    "zero_shot_prediction": "attributes for classes that they were not fitted to, with and without ZSR (GSP, figure 5)",
    "gsp_weights": "pooling weights on a map of colors, by linear program and smoothed (GSP, figure 2)",
    "collage_samples": "collages of CIFAR-100 beside the images that they are made of (GSP, figures 4 and 11)",
    "gsp_mu": "GSP over mu, the share of the pixels that is transported (GSP, figure 7 right)",
    "gsp_m_eps": "GSP over the number of prototypes and the smoothing (GSP, figure 10, table 7)",
    "untrained_poolings": "poolings of a pretrained map without training (ProxyNCA++, table 11, first rows)",
    "object_size": "average and maximum pooling by the size of the object (ProxyNCA++, figure 7); needs boxes",
}
"""Studies, each with ``conf/study_<name>.yaml`` and ``conduct`` of ``studies/<name>.py``, or ``_FUNCTIONS``."""
_FUNCTIONS = {
    "gsp_mu": "gsp_values.over_mu",
    "gsp_m_eps": "gsp_values.over_m_and_epsilon",
    "xml_prototypes": "prototypes.xml",
    "zero_shot_prediction": "prototypes.zero_shot_prediction",
}


def main(line: CommandLine) -> None:
    chosen = first_word(line, STUDIES, usage="study NAME", unknown="say which: dmlbench study NAME; '{}' is no study")
    if chosen is None:
        return
    name, rest = chosen
    if line.is_sweep:
        raise ConfigError("-m: a study compares values of its own keys. Leave -m out.")
    run_command(f"study_{name}", functools.partial(conduct, name), rest)


def conduct(name: str, cfg: DictConfig) -> None:
    from dmlbench.studies.record import conduct_study, to_markdown

    module, _, function = _FUNCTIONS.get(name, f"{name}.conduct").partition(".")
    study = getattr(importlib.import_module(f"dmlbench.studies.{module}"), function)
    findings, written = conduct_study(name, cfg, study)
    print(to_markdown(findings))
    print("\n".join(f"written: {path}" for path in written))
