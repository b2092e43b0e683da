"""Where each published data set comes from: its archives and their checksums, its terms, and its expected layout."""

from dataclasses import dataclass
from pathlib import Path

from dmlbench.data.readers import cars196, cifar, cub200, cub200_2010, inshop, omniglot, sop, tiny_imagenet
from dmlbench.data.readers.layouts import DataFolder, Layout
from dmlbench.types import DataError


@dataclass(frozen=True)
class Archive:
    """One file that a data set is published as; files without a checksum are not downloaded."""

    name: str
    md5: str | None = None
    size: int | None = None


@dataclass(frozen=True)
class Source:
    """How to get one data set.

    Attributes:
        place: how its reader finds it, with its published counts.
        terms: permitted use, as far as the publisher states it.
        alternatives: sets of files, each of which is the complete data set; the preferred one first.
        by_hand: how to get the files without this program.
        mirrors: folders to download the files from; none where links are dead or an agreement is needed.
        is_read_packed: whether the archives are read without unpacking.
    """

    place: DataFolder
    home: str
    terms: str
    citation: str
    alternatives: tuple[tuple[Archive, ...], ...]
    by_hand: str
    mirrors: tuple[str, ...] = ()
    is_read_packed: bool = False

    @property
    def name(self) -> str:
        return self.place.name

    @property
    def title(self) -> str:
        return self.place.title

    @property
    def archives(self) -> tuple[Archive, ...]:
        return tuple(archive for files in self.alternatives for archive in files)

    def links(self, archive: Archive) -> list[str]:
        """Where to download an archive from."""
        return [mirror + archive.name for mirror in self.mirrors if archive.md5]

    def find(self, root: str | Path) -> tuple[Path, Layout] | None:
        """The data set's folder below ``root`` and its layout, if it is there."""
        try:
            return self.place.find(root)
        except DataError:
            return None


def _cifar(place: DataFolder, *, md5: str, size: int) -> Source:
    archive = f"{place.title.lower()}-python.tar.gz"
    return Source(
        place=place,
        home="https://www.cs.toronto.edu/~kriz/cifar.html",
        terms="none stated; cite the report",
        citation="A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009",
        alternatives=((Archive(archive, md5, size),),),
        by_hand=f"get {archive} (the python version) from www.cs.toronto.edu/~kriz/cifar.html",
        mirrors=("https://www.cs.toronto.edu/~kriz/",),
        is_read_packed=True,
    )


_ALL = (
    Source(
        place=cub200.FOLDER,
        home="https://www.vision.caltech.edu/datasets/cub_200_2011/",
        terms="non-commercial research and education",
        citation="C. Wah et al., The Caltech-UCSD Birds-200-2011 Dataset, CNS-TR-2011-001, Caltech 2011",
        alternatives=((Archive("CUB_200_2011.tgz", "97eceeb196236b17998738112f37df78", 1_150_585_339),),),
        by_hand="get CUB_200_2011.tgz from data.caltech.edu/records/65de6-vp158",
        mirrors=("https://data.caltech.edu/records/65de6-vp158/files/",),
    ),
    Source(
        place=cub200_2010.FOLDER,
        home="http://www.vision.caltech.edu/visipedia/CUB-200.html",
        terms="non-commercial research and education",
        citation="P. Welinder et al., Caltech-UCSD Birds 200, CNS-TR-2010-001, Caltech 2010",
        alternatives=((Archive("images.tgz"),),),
        by_hand="get the images.tgz of 2010 from the authors or a mirror: the publisher's page has gone",
    ),
    Source(
        place=cars196.FOLDER,
        home="https://ai.stanford.edu/~jkrause/cars/car_dataset.html",
        terms="research",
        citation="J. Krause et al., 3D Object Representations for Fine-Grained Categorization, 3DRR 2013",
        alternatives=(
            (
                Archive("car_ims.tgz", "d5c8f0aa497503f355e17dc7886c3f14"),
                Archive("cars_annos.mat", "b407c6086d669747186bd1d764ff9dbc"),
            ),
            (
                Archive("cars_train.tgz", "065e5b463ae28d29e77c1b4b166cfe61"),
                Archive("cars_test.tgz", "4ce7ebf6a94d07f1952d94dd34c4d501"),
                Archive("car_devkit.tgz", "c3b158d763b6e2245038c8ad08e45376"),
                Archive("cars_test_annos_withlabels.mat", "b0a2b23655a3edd16d84508592a98d10"),
            ),
        ),
        by_hand="the publisher's links are dead since 2023: get car_ims.tgz with cars_annos.mat, or cars_train, "
        "cars_test and the devkit with cars_test_annos_withlabels.mat, from a mirror such as Kaggle's "
        "'Stanford Cars Dataset'",
    ),
    Source(
        place=sop.FOLDER,
        home="https://cvgl.stanford.edu/projects/lifted_struct/",
        terms="research; the images belong to the sellers who put them on eBay",
        citation="H. Oh Song et al., Deep Metric Learning via Lifted Structured Feature Embedding, CVPR 2016",
        alternatives=((Archive("Stanford_Online_Products.zip", "7f73d41a2f44250d4779881525aea32e"),),),
        by_hand="get Stanford_Online_Products.zip from cvgl.stanford.edu/projects/lifted_struct",
        mirrors=("http://ftp.cs.stanford.edu/cs/cvgl/", "ftp://cs.stanford.edu/cs/cvgl/"),
    ),
    Source(
        place=inshop.FOLDER,
        home="https://mmlab.ie.cuhk.edu.hk/projects/DeepFashion/InShopRetrieval.html",
        terms="non-commercial research and education, by an agreement with MMLAB (CUHK)",
        citation="Z. Liu et al., DeepFashion: Powering Robust Clothes Recognition and Retrieval with Rich Annotations, "
        "CVPR 2016",
        alternatives=((Archive("img.zip"), Archive("list_eval_partition.txt")),),
        by_hand="follow the agreement at mmlab.ie.cuhk.edu.hk/projects/DeepFashion/InShopRetrieval.html, then get "
        "Img/img.zip and Eval/list_eval_partition.txt",
    ),
    _cifar(cifar.FOLDER_10, md5="c58f30108f718f92721af3b95e74349a", size=170_498_071),
    _cifar(cifar.FOLDER_100, md5="eb9058c3a382ffc7106e4002c42a8d85", size=169_001_437),
    Source(
        place=omniglot.FOLDER,
        home="https://github.com/brendenlake/omniglot",
        terms="MIT licence",
        citation="B. Lake, R. Salakhutdinov, J. Tenenbaum, Human-level concept learning through probabilistic program "
        "induction, Science 350, 2015",
        alternatives=(
            (
                Archive("images_background.zip", "68d2efa1b9178cc56df9314c21c6e718"),
                Archive("images_evaluation.zip", "6b91aef0f799c5bb55b94e3f2daec811"),
            ),
            (Archive("images_background_small1.zip"),),
            (Archive("images_background_small2.zip"),),
        ),
        by_hand="get images_background.zip and images_evaluation.zip from github.com/brendenlake/omniglot "
        "(folder python)",
        mirrors=("https://raw.githubusercontent.com/brendenlake/omniglot/master/python/",),
        is_read_packed=True,
    ),
    Source(
        place=tiny_imagenet.FOLDER,
        home="http://cs231n.stanford.edu/",
        terms="ImageNet's terms: non-commercial research and education",
        citation="Y. Le, X. Yang, Tiny ImageNet Visual Recognition Challenge, CS231N report, Stanford 2015",
        alternatives=((Archive("tiny-imagenet-200.zip", "90528d7ca1a48142e341f4ef8d21d0de", 248_100_043),),),
        by_hand="get tiny-imagenet-200.zip from cs231n.stanford.edu",
        mirrors=("http://cs231n.stanford.edu/",),
    ),
)
SOURCES = {source.name: source for source in _ALL}
