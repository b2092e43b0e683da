"""Generalization over train-test shifts of measured size (ooDML): distances, splits, and runs over them.

Source: T. Milbich et al., "Characterizing Generalization under Out-Of-Distribution Shifts in Deep Metric Learning",
    NeurIPS 2021.
"""

from dmlbench.oodml.frechet import frechet_distance

__all__ = ["frechet_distance"]
