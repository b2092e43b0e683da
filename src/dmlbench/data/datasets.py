"""The data sets by name, for whoever wants one without knowing which module it lives in."""

from dmlbench.data.cars196 import cars196
from dmlbench.data.cifar import cifar10, cifar100
from dmlbench.data.cub200 import cub200
from dmlbench.data.cub200_2010 import cub200_2010
from dmlbench.data.folder import folder
from dmlbench.data.glyphs import glyphs, glyphs_collage
from dmlbench.data.inshop import inshop
from dmlbench.data.omniglot import omniglot
from dmlbench.data.sop import sop
from dmlbench.data.tiny_imagenet import tiny_imagenet

__all__ = [
    "cars196",
    "cifar10",
    "cifar100",
    "cub200",
    "cub200_2010",
    "folder",
    "glyphs",
    "glyphs_collage",
    "inshop",
    "omniglot",
    "sop",
    "tiny_imagenet",
]
