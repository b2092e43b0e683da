"""The papers' tables and figures as experiments: all are there, and each own row is a command or says what lacks."""

import csv
import importlib.resources
from collections import Counter
from pathlib import Path

import pytest
from commands_of_tables import CONF, command_of, commands, reproduce_of

from dmlbench import papers
from dmlbench.checks import check
from dmlbench.cli.arguments import parse
from dmlbench.cli.simple_commands import OODML, STUDIES
from dmlbench.config import compose, key_of, schema_of
from dmlbench.data.split_file import FORMAT, read_splits
from dmlbench.papers import load_table, tables
from dmlbench.runtime import write_json
from dmlbench.types import ConfigError

# Figures with results or samples of data, by what each paper shows; others are sketches and pictures of single images.
FIGURES = {
    "gsp": ("2", "3a", "3b", "4", "5", "6", "7a", "7b", "8", "9", "10a", "10b", "11"),
    "xml": ("3", "4"),
    "proxynca_pp": ("1", "3", "4a", "4b", "4c", "5", "6", "7"),
    "avsl": ("5a", "5b", "9", "10"),
    "oodml": ("1", "2", "3", "4", "5", "6", "7", "_s1", "_s2", "_s3", "_s4", "_s5", "_s6", "_s7", "_s8"),
}
OF_PAPERS = {*tables(), *(f"{paper}/figure{number}" for paper, numbers in FIGURES.items() for number in numbers)}
OTHERS = {"avsl/base", "avsl/glyphs", "avsl/glyphs_baseline", "avsl/omniglot", "avsl/omniglot_baseline"}
OTHERS |= {"proxynca_pp/base"}


def test_every_table_and_figure_with_results_has_a_file_of_its_name() -> None:
    files = {str(path.relative_to(CONF).with_suffix("")) for path in CONF.glob("*/*.yaml")}
    assert files == OF_PAPERS | OTHERS
    assert all(isinstance(reproduce_of(name), dict) for name in OF_PAPERS)


@pytest.mark.fast_sample(8)
@pytest.mark.parametrize("name", tables())
def test_every_own_row_is_a_command_or_names_what_is_missing(name: str) -> None:
    node, scores = reproduce_of(name), load_table(name)
    if "needs" in node or "commands" in node:
        assert set(node) <= {"needs", "commands"}
        return
    assert {score.row for score in scores if score.origin == "own"} <= node["rows"].keys()
    for score in scores:
        if score.origin == "own":
            assert command_of(name, score), score
            assert score.setting in node.get("settings", {""})
    # what is said of no score is a slip of the pen
    assert node["rows"].keys() <= {score.row for score in scores if score.origin != "quoted"}
    assert node.get("settings", {}).keys() <= {score.setting for score in scores}
    assert node.get("datasets", {}).keys() <= {score.dataset for score in scores}
    assert node.get("embedding_sizes", {}).keys() <= {score.embedding_size for score in scores}


@pytest.mark.slow
def test_methods_that_papers_quote_are_run_by_what_is_said_of_them() -> None:
    listed = importlib.resources.files(papers).joinpath("quoted.csv").read_text(encoding="utf-8").splitlines()
    runs = [line["run"] for line in csv.DictReader(listed) if line["run"]]
    assert len(runs) > 10
    for run in runs:
        assert compose("train", run.format(dataset="cars196").split()).loss, run


def test_nothing_is_trained_of_a_table_that_cannot_be_run() -> None:
    with pytest.raises(
        ConfigError, match=r"is not a training run. Run instead: dmlbench train -m recipe=oodml dataset=cub200"
    ):
        check(compose("train", ["experiment=oodml/table_s4"]))


MADE = [(name, line) for name in sorted(OF_PAPERS) for line in reproduce_of(name).get("commands", ())]


@pytest.mark.fast_sample(12)
@pytest.mark.parametrize(("name", "line"), MADE)
def test_commands_that_make_a_table_are_commands(name: str, line: str) -> None:
    program, command, *arguments = line.replace("<config>", "config").split()
    assert program == "dmlbench"
    parsed = parse(command, arguments)
    if command == "oodml":
        assert parsed.words[0] in OODML
        keys = schema_of(f"oodml_{parsed.words[0]}").__dataclass_fields__
        assert {key_of(override).partition(".")[0] for override in parsed.overrides} <= keys.keys()
        assert len(parsed.words) == 1 or "configs" in keys
    elif command == "study":
        assert parsed.words[0] in STUDIES and len(parsed.words) == 1
        keys = schema_of(f"study_{parsed.words[0]}").__dataclass_fields__
        assert {key_of(override).partition(".")[0] for override in parsed.overrides} <= keys.keys()
    else:
        assert command in ("aggregate", "reproduce", "train")


@pytest.mark.slow
@pytest.mark.parametrize("line", sorted({line for _, line in MADE if line.startswith("dmlbench train")}))
def test_trainings_of_such_a_table_compose_at_the_end_of_their_sweep(line: str, tmp_path: Path) -> None:
    splits = tmp_path / "splits.json"
    split = {"name": "1", "kind": "default", "distance": 1.0, "fitted": [], "validation": []}
    halves = {"train": ["1", "2", "3", "4"], "test": ["5", "6"]}
    document = {"format": FORMAT, "dataset": "", "measured_by": "nothing", "splits": [split | halves]}
    write_json(splits, document)
    words = line.replace("<run>", "run").split()[2:]
    overrides = [word.partition("=") for word in words if word != "-m"]
    chosen = [f"{key}={splits if key == 'protocol.splits' else value.split(',')[-1]}" for key, _, value in overrides]
    cfg = compose("train", chosen)
    if cfg.runtime.choices.get("protocol") == "oodml" or "splits" in cfg.protocol:
        assert cfg.protocol.splits_sha256 == read_splits(splits).sha256
        assert cfg.runtime.recipe.name == "oodml" and cfg.head.out_features == 512


def test_there_are_as_many_configs_as_the_papers_have_numbers_for() -> None:
    count = Counter(command.table for command in commands())
    wanted = {  # rows x data sets, less those that need something
        "gsp/table1": 4 * 4, "gsp/table2": 25 * 4, "gsp/table3": 2 * 2 * 4 + 4, "gsp/table4": 2 * 4,
        "gsp/table6": 21 * 4, "gsp/table7": 9 * 2, "xml/table1": 8 * 4,
        # ProxyNCA, ProxyNCA++ without max and fast, and ProxyNCA++ at three sizes
        "proxynca_pp/table3": 5, "proxynca_pp/table4": 5, "proxynca_pp/table5": 5, "proxynca_pp/table6": 5,
        "proxynca_pp/table7": 7, "proxynca_pp/table8": 7 * 2, "proxynca_pp/table9": 10 * 2,
        "proxynca_pp/table10": 11 * 2, "proxynca_pp/table12": 8, "proxynca_pp/table13": 8,
        "proxynca_pp/table14": 4, "proxynca_pp/table15": 4, "proxynca_pp/appendix_d": 1,
        "avsl/table1": 4 * 3, "avsl/table2": 5, "avsl/table3": 4, "avsl/table4": 3, "avsl/figure5b": 1,
        "hyp_vit/table1": 3 * 4, "hyp_vit/table2": 9 * 4, "hist/table1": 6, "recall_at_k/table1": 4,
        "hier/table1": 11 * 4,
    }  # fmt: skip
    assert {table: number for table, number in count.items() if table in tables()} == wanted
