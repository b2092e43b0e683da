"""Embedding of images, exact search and retrieval scores."""

from dmlbench.evaluation.evaluate import Evaluation, evaluate_arrays
from dmlbench.evaluation.spec import EvaluationSpec

__all__ = ["Evaluation", "EvaluationSpec", "evaluate_arrays"]
