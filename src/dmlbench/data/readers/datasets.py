"""The data sets by name, for whoever wants one without knowing which module it lives in."""

from dmlbench.data.readers.cars196 import cars196
from dmlbench.data.readers.cifar import cifar10, cifar100
from dmlbench.data.readers.cub200 import cub200
from dmlbench.data.readers.folder import folder
from dmlbench.data.readers.glyphs import glyphs, glyphs_collage
from dmlbench.data.readers.inshop import inshop
from dmlbench.data.readers.omniglot import omniglot
from dmlbench.data.readers.sop import sop
from dmlbench.data.readers.tiny_imagenet import tiny_imagenet

__all__ = [
    "cars196",
    "cifar10",
    "cifar100",
    "cub200",
    "folder",
    "glyphs",
    "glyphs_collage",
    "inshop",
    "omniglot",
    "sop",
    "tiny_imagenet",
]
