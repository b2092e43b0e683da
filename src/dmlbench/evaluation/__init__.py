"""Embedding of images, exact search and retrieval scores."""

from dmlbench.evaluation.embeddings.arrays import evaluate_arrays
from dmlbench.evaluation.evaluate import Evaluation
from dmlbench.evaluation.task import EvaluationSpec

__all__ = ["Evaluation", "EvaluationSpec", "evaluate_arrays"]
