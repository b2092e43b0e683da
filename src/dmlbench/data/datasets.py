"""The data sets by name, for whoever wants one without knowing which module it lives in."""

from dmlbench.data.cars196 import cars196
from dmlbench.data.folder import folder
from dmlbench.data.glyphs import glyphs, glyphs_collage
from dmlbench.data.omniglot import omniglot

__all__ = ["cars196", "folder", "glyphs", "glyphs_collage", "omniglot"]
