"""Embedding of images, exact search and retrieval scores."""

from dmlbench.evaluation.arrays import evaluate_arrays
from dmlbench.evaluation.evaluate import Evaluation, EvaluationSpec

__all__ = ["Evaluation", "EvaluationSpec", "evaluate_arrays"]
