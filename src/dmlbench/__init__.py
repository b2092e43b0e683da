"""dmlbench compares deep metric learning methods under the protocols of the papers."""

__version__ = "0.1.0"
