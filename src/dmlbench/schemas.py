"""The schemas of the top level of every configuration: what keys a command knows, and of which type.

They work without torch, so that a misspelt key fails at once.
"""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass
class PathsConfig:
    """Where files lie: results, data sets of the user, and images prepared once."""

    output_dir: str = MISSING
    data_dir: str = MISSING
    cache_dir: str = MISSING


@dataclass
class RuntimeConfig:
    """Values known only once the data set and the model are there; ``build.py`` sets them, nobody else."""

    num_classes: int = MISSING
    image_size: Any = MISSING  # height and width of the images that the network gets
    num_channels: int = MISSING  # of the map that is pooled
    num_features: int = MISSING  # of the side output "features": channels of what the pooling works on
    map_size: Any = MISSING  # height and width of that map; set where the pooling asks for it
    embedding_size: int = MISSING
    steps_per_epoch: int = MISSING  # batches of the sampler's epoch; ``${epochs:3}`` is three times that
    # of the recipe that took part: its name and side, where its values stand, and which of them something replaced
    recipe: dict[str, Any] = field(default_factory=dict)
    choices: dict[str, str] = field(default_factory=dict)
    given: list[str] = field(default_factory=list)  # keys of the command line
    content: Any = None  # SHA-256 of weights and user code, see identity.py


@dataclass
class TrainConfig:
    """Top level of ``dmlbench train``: one run is one config at its coordinates (fold, repeat)."""

    dataset: Any = MISSING
    transform: Any = MISSING
    sampler: Any = MISSING
    protocol: Any = MISSING
    backbone: Any = MISSING
    pooling: Any = MISSING
    head: Any = MISSING
    loss: Any = MISSING
    miner: Any = None
    regularizer: Any = None
    rerank: Any = None
    optim: Any = MISSING
    schedule: Any = None
    fit: Any = MISSING
    evaluation: Any = MISSING
    logger: Any = None
    reproduce: Any = None  # of an experiment that is a paper's table: which row is which command, or what is missing
    fold: int = 0
    repeat: int = 0
    base_seed: int = 0
    device: str = "auto"
    num_workers: int | None = None
    image_cache: bool = True
    eval_batch_size: int = 128
    paths: PathsConfig = field(default_factory=PathsConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)


@dataclass
class EvaluateConfig:
    """Top level of ``dmlbench evaluate``: scores of a finished run or of a file of embeddings."""

    run: str | None = None
    embeddings: str | None = None
    labels: str | None = None
    gallery: str | None = None
    gallery_labels: str | None = None
    model: str | None = None
    from_checkpoint: bool = False
    output: str | None = None
    per_query: str | None = None
    per_class: str | None = None
    hardest: int | None = None
    hardest_by: str = "map_at_r"
    metrics: tuple[str, ...] = ("p_at_1", "recall_at_k", "r_precision", "map_at_r")
    recall_at: tuple[int, ...] = (1, 2, 4, 8)
    evaluation: Any = MISSING
    rerank: Any = None
    device: str = "auto"
    num_workers: int | None = None


@dataclass
class EmbedConfig:
    """Top level of ``dmlbench embed``: embeddings of a folder of images by a trained model."""

    model: str | None = None
    images: str | None = None
    output: str | None = None
    modules: tuple[str, ...] = ()
    device: str = "auto"
    batch_size: int = 128
    num_workers: int = 0


@dataclass
class ExportConfig:
    """Top level of ``dmlbench export``: a finished run as a folder that stands alone."""

    run: str | None = None
    output: str | None = None
    formats: tuple[str, ...] | None = None
    license: str | None = None


@dataclass
class ExplainConfig:
    """Top level of ``dmlbench explain``: what a trained pooling looks at, or why two images are alike to AVSL."""

    run: Any = None
    images: Any = None
    num_images: int = 6
    pair: Any = None
    num_nodes: int = 3
    reliable: int = 128
    output: str | None = None
    device: str = "auto"


@dataclass
class ImportConfig:
    """Top level of ``dmlbench import``: test embeddings of other code as a config."""

    name: str | None = None
    dataset: Any = MISSING
    transform: Any = MISSING
    protocol: Any = MISSING
    embeddings: str | None = None
    labels: str | None = None
    gallery: str | None = None
    gallery_labels: str | None = None
    trained: str | None = None
    selected: str | None = None
    allow_partial: bool = False
    metrics: tuple[str, ...] = ("p_at_1", "recall_at_k", "r_precision", "map_at_r")
    recall_at: tuple[int, ...] = (1, 2, 4, 8)
    evaluation: Any = MISSING
    fold: int = 0
    repeat: int = 0
    paths: PathsConfig = field(default_factory=PathsConfig)


@dataclass
class ConfigsConfig:
    """What the commands that summarize configs have in common: which configs, and by which metrics."""

    configs: str = "**"
    metrics: tuple[str, ...] = ("p_at_1", "map_at_r")
    recall_at: tuple[int, ...] = (1, 2, 4, 8)
    evaluation: Any = MISSING
    allow_partial: bool = False
    paths: PathsConfig = field(default_factory=PathsConfig)


@dataclass
class AggregateConfig(ConfigsConfig):
    """Top level of ``dmlbench aggregate``: runs of configs to one summary a config."""

    force: bool = False
    metrics: tuple[str, ...] = ("p_at_1", "recall_at_k", "r_precision", "map_at_r")


@dataclass
class TableConfig(ConfigsConfig):
    """Top level of ``dmlbench table``: aggregated configs to Markdown, CSV and LaTeX."""

    facts: tuple[str, ...] = ()
    compare: tuple[str, ...] | None = None
    name: str | None = None


@dataclass
class ReportConfig(ConfigsConfig):
    """Top level of ``dmlbench report``: aggregated configs as a page to look through, or as a picture."""

    picture: bool = False
    queries: int = 6
    nearest: int = 5
    classes: int = 200
    overlays: bool = True
    output: str | None = None
    device: str = "auto"


@dataclass
class ReproduceConfig:
    """Top level of ``dmlbench reproduce``: a paper's table from its runs, with the paper's numbers beside ours."""

    table: str | None = None
    rows: Any = None
    fold: Any = None
    repeat: Any = None
    list: bool = False
    measured: str | None = None
    dry_run: bool = False
    run_missing: bool = True
    shard: str | None = None
    allow_mixed: bool = False
    metrics: tuple[str, ...] = ("p_at_1", "map_at_r")
    recall_at: tuple[int, ...] = (1, 2, 4, 8)
    paths: PathsConfig = field(default_factory=PathsConfig)


@dataclass
class TuneConfig:
    """Top level of ``dmlbench tune``: hyper-parameters searched under ``protocol=hpo``."""

    name: str = MISSING
    train: tuple[str, ...] = ()
    space: dict[str, Any] = field(default_factory=dict)
    runs: Any = MISSING
    trials: int = MISSING
    startup_trials: int = MISSING
    pruner: Any = None
    seed: int = 0
    paths: PathsConfig = field(default_factory=PathsConfig)


@dataclass
class StatusConfig:
    """Top level of ``dmlbench status``: what became of runs."""

    configs: str = "**"
    state: Any = None
    paths: PathsConfig = field(default_factory=PathsConfig)


@dataclass
class CleanConfig:
    """Top level of ``dmlbench clean``: removing runs."""

    configs: str | None = None
    state: Any = None
    ask: bool = True
    paths: PathsConfig = field(default_factory=PathsConfig)


@dataclass
class DataConfig:
    """Top level of ``dmlbench data``: looking at a data set, and making it ready."""

    dataset: Any = MISSING
    transform: Any = MISSING
    decode: bool = True
    jobs: int | None = None
    archives: Any = None
    password: str | None = None
    download: bool = True
    accept_other_checksum: bool = False
    paths: PathsConfig = field(default_factory=PathsConfig)


@dataclass
class FeaturesConfig:
    """What the commands have in common that look at a data set by a network."""

    dataset: Any = MISSING
    transform: Any = MISSING
    backbone: Any = MISSING
    network: str = MISSING
    run: str | None = None
    device: str = "auto"
    num_workers: int | None = None
    image_cache: bool = True
    eval_batch_size: int = 128
    output: str | None = None
    paths: PathsConfig = field(default_factory=PathsConfig)


@dataclass
class OodmlSplitsConfig(FeaturesConfig):
    """Top level of ``dmlbench oodml splits``: train-test splits of growing distance."""

    over: str = "class_means"
    per_step: int | None = None
    exchanges: int = 24
    reversed_exchanges: int = 14
    removals: int = 40
    keep: float = 0.6
    picks: int = 8
    alike: int = 5
    also: Any = None
    points: int = 2000


@dataclass
class OodmlDistancesConfig(FeaturesConfig):
    """Top level of ``dmlbench oodml distances``: the splits of a file, measured by a network."""

    over: str = "class_means"
    splits: str | None = None
    train: str | None = None


@dataclass
class ScoredFeaturesConfig(FeaturesConfig):
    """The same of commands that score what they look at."""

    metrics: tuple[str, ...] = ("recall_at_1", "oodml_map_at_1000", "map_at_r")
    recall_at: tuple[int, ...] = (1, 2, 4, 8)
    evaluation: Any = MISSING


@dataclass
class OodmlFrozenConfig(ScoredFeaturesConfig):
    """Top level of ``dmlbench oodml frozen``: a network's features as they are, over the splits of a file."""

    splits: str | None = None


@dataclass
class OodmlTransferConfig(ScoredFeaturesConfig):
    """Top level of ``dmlbench oodml transfer``: trained models on another data set."""

    runs: Any = None


@dataclass
class OodmlScoresConfig(ConfigsConfig):
    """Top level of ``dmlbench oodml scores``: configs over the distance of their splits."""

    frozen: Any = None
    name: str | None = None


@dataclass
class OodmlFewShotConfig:
    """Top level of ``dmlbench oodml few_shot``: finished runs adapted to a few images of each test class."""

    run: Any = None
    configs: str | None = None
    shots: Any = (2, 5, 10)
    episodes: int = 10
    steps: int | None = None
    lr_factor: float = 10.0
    weight_decay: float | None = 0.0
    batch_size: int = 112
    images_per_class: int = 2
    beta: float | None = None
    margin: float = 0.2
    official: str | None = None
    merge_order: Any = None
    memory_bytes: int = 4 * 2**30
    metrics: tuple[str, ...] = ("p_at_1", "oodml_map_at_1000", "map_at_r")
    recall_at: tuple[int, ...] = (1, 2, 4, 8)
    evaluation: Any = MISSING
    name: str = "few_shot"
    device: str = "auto"
    num_workers: int | None = None
    paths: PathsConfig = field(default_factory=PathsConfig)


@dataclass
class OodmlStructureConfig:
    """Top level of ``dmlbench oodml structure``: measures of training embeddings beside test scores."""

    configs: str = "**"
    metrics: tuple[str, ...] = ("p_at_1",)
    recall_at: tuple[int, ...] = (1, 2, 4, 8)
    evaluation: Any = MISSING
    name: str = "structure"
    device: str = "auto"
    num_workers: int | None = None
    paths: PathsConfig = field(default_factory=PathsConfig)


@dataclass
class StudyConfig:
    """What all studies have in common."""

    name: str = MISSING
    seed: int = 0
    device: str = "auto"
    paths: PathsConfig = field(default_factory=PathsConfig)


@dataclass
class StudyTwoMoonsConfig(StudyConfig):
    """Top level of ``dmlbench study two_moons``: the temperature of a softmax classifier."""

    temperatures: tuple[float, ...] = MISSING
    points: int = MISSING
    noise: float = MISSING
    data_seed: int = MISSING
    hidden: int = MISSING
    steps: int = MISSING
    lr: float = MISSING
    repeats: int = MISSING


@dataclass
class StudyGspTimingConfig(StudyConfig):
    """Top level of ``dmlbench study gsp_timing``: what GSP's transport costs."""

    backbone: Any = MISSING
    network: str = MISSING
    iterations: tuple[int, ...] = MISSING
    prototypes: tuple[int, ...] = MISSING
    pixels: tuple[int, ...] = MISSING
    iterations_of_others: int = MISSING
    prototypes_of_others: int = MISSING
    pixels_of_others: int = MISSING
    transport_ratio: float = MISSING
    smoothing: float = MISSING
    batch: int = MISSING
    rounds: int = MISSING
    image_size: int = MISSING


@dataclass
class TrainedStudyConfig(StudyConfig):
    """The same of studies that train models."""

    train: Any = MISSING
    training: Any = None


@dataclass
class StudyXmlPrototypesConfig(TrainedStudyConfig):
    """Top level of ``dmlbench study xml_prototypes``: prototypes in place of averages, and for other classes."""

    images: int = MISSING
    centers: int = MISSING
    prototypes: int = MISSING
    splits: int = MISSING
    eval_images: int = MISSING
    metric: str = MISSING
    ridge: float = MISSING


@dataclass
class StudyGspTokensConfig(StudyConfig):
    """Top level of ``dmlbench study gsp_tokens``: bags of trainable tokens."""

    pooling: Any = MISSING
    mixing_mean: float = MISSING
    mixing_std: float = MISSING
    limit: float = MISSING
    lr: float = MISSING
    patience: int = MISSING
    samples_per_class: int = MISSING
    steps_per_epoch: int = MISSING
    epochs: int = MISSING
    embedding_size: int = MISSING
    margin: float = MISSING
    validation_samples: int = MISSING
    test_samples: int = MISSING
    repeats: int = MISSING


@dataclass
class StudyGspWeightsConfig(StudyConfig):
    """Top level of ``dmlbench study gsp_weights``: pooling weights on a map of colors."""

    transport_ratio: float = MISSING
    smoothings: tuple[float, ...] = MISSING
    noise: float = MISSING


@dataclass
class StudyCollageSamplesConfig(StudyConfig):
    """Top level of ``dmlbench study collage_samples``: collages of CIFAR-100 and what they are made of."""

    super_classes: tuple[str, ...] = MISSING
    images_per_class: int = MISSING


@dataclass
class StudyZeroShotPredictionConfig(TrainedStudyConfig):
    """Top level of ``dmlbench study zero_shot_prediction``: attributes for classes that they were not fitted to."""

    prototypes: int = MISSING
    splits: int = MISSING
    eval_images: int = MISSING
    ridge: float = MISSING


@dataclass
class GridStudyConfig(TrainedStudyConfig):
    """The same of studies that test values of a pooling."""

    folds: tuple[int, ...] = MISSING
    repeats: int = MISSING


@dataclass
class StudyGspMuConfig(GridStudyConfig):
    """Top level of ``dmlbench study gsp_mu``: GSP over the share of the pixels that is transported."""

    transport_ratios: tuple[float, ...] = MISSING
    low: float = MISSING


@dataclass
class StudyGspMEpsConfig(GridStudyConfig):
    """Top level of ``dmlbench study gsp_m_eps``: GSP over the number of prototypes and the smoothing."""

    prototypes: tuple[int, ...] = MISSING
    smoothings: tuple[float, ...] = MISSING
    transport_ratio: float = MISSING


@dataclass
class StudyUntrainedPoolingsConfig(StudyConfig):
    """Top level of ``dmlbench study untrained_poolings``: poolings of a pretrained network's map."""

    dataset: Any = MISSING
    transform: Any = MISSING
    backbone: Any = MISSING
    network: str = MISSING
    poolings: tuple[str, ...] = MISSING
    known: dict[str, Any] = field(default_factory=dict)
    num_workers: int | None = None
    image_cache: bool = True
    eval_batch_size: int = 128


@dataclass
class StudyObjectSizeConfig(StudyConfig):
    """Top level of ``dmlbench study object_size``: R@1 by the share of the image that an object covers."""

    gap: Any = None
    gmp: Any = None
    edges: tuple[float, ...] = MISSING


SCHEMAS = {
    "train": TrainConfig,
    "evaluate": EvaluateConfig,
    "embed": EmbedConfig,
    "export": ExportConfig,
    "explain": ExplainConfig,
    "import": ImportConfig,
    "aggregate": AggregateConfig,
    "table": TableConfig,
    "report": ReportConfig,
    "reproduce": ReproduceConfig,
    "tune": TuneConfig,
    "status": StatusConfig,
    "clean": CleanConfig,
    "data": DataConfig,
    "oodml_splits": OodmlSplitsConfig,
    "oodml_distances": OodmlDistancesConfig,
    "oodml_scores": OodmlScoresConfig,
    "oodml_frozen": OodmlFrozenConfig,
    "oodml_transfer": OodmlTransferConfig,
    "oodml_few_shot": OodmlFewShotConfig,
    "oodml_structure": OodmlStructureConfig,
    "study_two_moons": StudyTwoMoonsConfig,
    "study_gsp_timing": StudyGspTimingConfig,
    "study_xml_prototypes": StudyXmlPrototypesConfig,
    "study_gsp_tokens": StudyGspTokensConfig,
    "study_zero_shot_prediction": StudyZeroShotPredictionConfig,
    "study_gsp_weights": StudyGspWeightsConfig,
    "study_collage_samples": StudyCollageSamplesConfig,
    "study_untrained_poolings": StudyUntrainedPoolingsConfig,
    "study_object_size": StudyObjectSizeConfig,
    "study_gsp_mu": StudyGspMuConfig,
    "study_gsp_m_eps": StudyGspMEpsConfig,
}
