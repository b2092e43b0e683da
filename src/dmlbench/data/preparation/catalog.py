"""The published data sets that have files of their own, by their names in the configuration."""

from dmlbench.data.readers import cars196, cifar, cub200, inshop, omniglot, sop, tiny_imagenet

_FOLDERS = (
    *(cub200.OF_2011, cub200.OF_2010, cars196.FOLDER, sop.FOLDER, inshop.FOLDER),
    *(cifar.FOLDER_10, cifar.FOLDER_100, omniglot.FOLDER, tiny_imagenet.FOLDER),
)
SOURCES = {folder.name: folder for folder in _FOLDERS}


def title_of(name: str) -> str:
    """The published name of a data set, such as CUB-200-2011; of others the name itself."""
    return SOURCES[name].title if name in SOURCES else name
