"""The command line as users write it: order of arguments, lists, file names, and mistakes answered in one line."""

import re
from pathlib import Path

import pytest

from dmlbench.checks import check
from dmlbench.cli.arguments import for_hydra, parse
from dmlbench.cli.main import COMMANDS
from dmlbench.cli.simple_commands import OODML, STUDIES
from dmlbench.config import compose, schema_of
from dmlbench.identity import config_id

LOSSES = "pytorch_metric_learning.losses."
PROXIES = ("loss.num_classes=${runtime.num_classes}", "loss.embedding_size=${runtime.embedding_size}")


def hydra_takes(command: str, *arguments: str) -> list[str]:
    return for_hydra(command, parse(command, arguments))


@pytest.mark.fast_sample(4)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pooling=[gap]"], "pooling=[gap]: expected the name of one pooling, such as pooling="),
        (["omniglot/*"], "expected key=value, got 'omniglot/*'. See dmlbench train --help."),
        (["=3"], "=3: expected key=value"),
        (["fold==3"], "cannot parse fold==3"),
        (["pooling=gap,gmp"], "pooling=gap,gmp: got several values, expected one. Add -m"),
        (["dataset=omniglot/*"], "omniglot=* is unknown"),
        (
            ["loss._target_=pytorch_metric_learning.losses.NTXentLoss", "+loss.temperature=nan"],
            "loss.temperature: got nan, expected a finite number.",
        ),
        (["--fast"], "unrecognized arguments: --fast. See dmlbench train --help."),
        (["--shard", "2/3"], "--shard: got dmlbench train, expected dmlbench reproduce. To share a sweep, start "),
        (["--why", "-m"], "--why explains one run"),
        (["--config-dir"], "--config-dir/-cd: expected one argument"),
        (["--config-dir", "nowhere"], "--config-dir: got nowhere, expected an existing folder."),
        (["optm.lr=1"], "no key 'optm': did you mean 'optim'? Known: "),
        (["fold="], "fold: got '', expected a whole number.\n"),
        (["fit.max_steps=${epoch:4}"], "got ${epoch:4}, expected a value, ${<key>} or ${epochs:<number>}."),
        (["fit.max_steps=${head.outfeatures}"], "which has no value: did you mean 'head.out_features'?"),
        (["regularizer=xml_recursive"], "num_prototypes: got ${pooling.num_prototypes}, which has no value: dmlbench."),
        (["paths.output_dir="], "paths.output_dir: got '', expected a folder"),
        (["--dry-run", "paths.output_dir="], "paths.output_dir: got '', expected a folder"),
        (["--dry-run", "device=gpu"], "device: got 'gpu', expected auto, free, cpu or cuda[:N]."),
        (["--dry-run", "num_workers=-1"], "num_workers: got -1, expected 0 to 256"),
        (["regularizer=[zsr,zrs]"], "regularizer=zrs is unknown: did you mean 'zsr'?"),
        (["optim=5"], "optim=5: expected the name of one optim, such as optim=adam"),
        (["miner=2"], "miner=2: expected the name of one miner, such as miner="),
    ],
)
def test_a_mistake_is_one_line_before_data_is_read(command, tmp_path, monkeypatch, arguments, message) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DMLBENCH_CACHE", str(tmp_path / "cache"))
    error = command("train", *arguments, code=2)
    assert message in error
    assert len(error.splitlines()) == 1
    assert "hydra.cc" not in error and "Lexer" not in error
    assert not list(tmp_path.iterdir())


def test_users_name_the_entries_of_mappings() -> None:
    assert hydra_takes("evaluate", "fail_below={map_at_r: 0.2}") == ["++fail_below={map_at_r: 0.2}"]
    composed = compose("tune", hydra_takes("tune", "demo", "space.optim.beta={low: 1e-6, high: 1e-2}", "name=a"))
    assert composed.space["optim"]["beta"] == {"low": 1e-6, "high": 1e-2}


def test_options_stand_anywhere_and_several_regularizers_compose(tmp_path: Path) -> None:
    line = parse("train", ["a=1", "-m", "--config-dir", str(tmp_path), "b=2", "--cfg=job", "~c"])
    assert (line.is_sweep, line.cfg, line.config_dir, line.overrides) == (True, "job", tmp_path, ("a=1", "b=2", "~c"))
    for kept in ("regularizer=[zsr,xml]", "pooling=glob(*,exclude=none)", "pooling=choice(gap,gmp)"):
        assert hydra_takes("train", "-m", kept) == [kept]
    assert parse("reproduce", ["gsp/table2", "--shard", "1/4", "--dry-run"]).overrides == ("shard=1/4", "dry_run=true")


@pytest.mark.parametrize(
    ("command", "argument", "taken"),
    [
        ("train", "recall_at=1,10", "evaluation.recall_at=[1,10]"),
        ("train", "metrics=p_at_1", "evaluation.metrics=['p_at_1']"),
        ("train", "evaluation.metrics=null", "evaluation.metrics=null"),
        ("evaluate", "recall_at=10", "recall_at=[10]"),
        ("table", "metrics=p_at_1,recall_at_k", "metrics=['p_at_1','recall_at_k']"),
        ("table", "evaluation.recall_at=[1]", "evaluation.recall_at=[1]"),
        ("table", "compare=*-gap-*,*-gsp-*", "compare=['*-gap-*','*-gsp-*']"),
        ("evaluate", "run=out (1)/a,b=c", "run='out (1)/a,b=c'"),
        ("explain", "run=a,b", "run=['a','b']"),
        ("data", "password=0123", "password='0123'"),
        ("train", "protocol.splits=/tmp/é.json", "protocol.splits='/tmp/é.json'"),
        ("train", "backbone.weights_file=~/w.pth", "backbone.weights_file='~/w.pth'"),
        ("train", "head.out_features=64", "head.out_features=64"),
        ("data", "archives=a b (1).zip", "archives='a b (1).zip'"),
        ("reproduce", "rows=C1+XBM [18],C2*", "rows=['C1+XBM [18]','C2*']"),
        ("reproduce", "fold=0", "fold=[0]"),
        *((name, "*/fold[01]_rep0", "configs='*/fold[01]_rep0'") for name in ("table", "report", "status", "clean")),
    ],
)
def test_lists_patterns_and_file_names_need_no_quotes(command: str, argument: str, taken: str) -> None:
    assert hydra_takes(command, argument) == [taken]


@pytest.mark.parametrize("command", ["train", "table"])
def test_paths_begin_in_the_home_folder_where_a_user_writes_a_tilde(command: str, monkeypatch) -> None:
    monkeypatch.setenv("HOME", "/users/me")
    assert hydra_takes(command, "paths.output_dir=~/runs") == ["paths.output_dir='/users/me/runs'"]


def test_values_inside_of_a_swept_group_wait_for_its_options() -> None:
    arguments = ["-m", "pooling=gap,gsp", "pooling.memory_rows=16", "+pooling.x=[1,2]", "fold=0", "loss.scale=1"]
    assert hydra_takes("train", *arguments) == [
        "pooling=gap,gsp", "pooling.memory_rows=choice(16)", "+pooling.x=choice([1,2])", "fold=0", "loss.scale=1"
    ]  # fmt: skip
    groups = (["pooling=gap,gsp", "pooling.width=null"], ["pooling=glob(*,exclude=none)"], ["~miner", "loss.x=1"])
    for left_alone in groups:
        assert hydra_takes("train", "-m", *left_alone) == left_alone


def test_null_takes_a_group_out_of_the_configuration() -> None:
    arguments = ["schedule=null", "regularizer=null,zsr", "logger=null", "pooling.width=null"]
    assert hydra_takes("train", "-m", *arguments) == [
        "schedule=none", "regularizer=none,zsr", "logger=none", "pooling.width=null"
    ]  # fmt: skip
    assert compose("train", ["experiment=demo", "schedule=none", "logger=none"]).schedule is None


LINES = [*(name for name in COMMANDS if name not in ("oodml", "study", "submit")), *(f"oodml {word}" for word in OODML)]
LINES += [f"study {name}" for name in STUDIES]


@pytest.mark.parametrize(
    "words", [pytest.param(line, marks=() if line == "oodml splits" else pytest.mark.slow) for line in LINES]
)
def test_every_command_shows_examples_and_lists_its_keys(command, tmp_path, monkeypatch, words) -> None:
    monkeypatch.chdir(tmp_path)
    line = words.split()
    shown = command(*line, "--help")
    assert len(re.findall(rf"^  dmlbench {words}\b", shown, re.MULTILINE)) >= 2
    assert "--queries" not in shown and "--yes" not in shown
    error = command(*line, *(["verify", "glyphs"] if words == "data" else []), "nonsense=1", code=2)
    assert "no key 'nonsense': " in error and len(error.splitlines()) == 1
    listed = re.split("Known: |choose one of ", error)[1]
    for key in schema_of(words.replace(" ", "_")).__dataclass_fields__:
        assert key in listed


def test_a_module_beside_the_user_s_configuration_is_found(composed, tmp_path, monkeypatch) -> None:
    name = "my_module_beside"
    (tmp_path / f"{name}.py").write_text(
        "from pytorch_metric_learning.losses import ContrastiveLoss\nclass MyLoss(ContrastiveLoss):\n    pass\n"
    )
    folder = tmp_path / "my_conf"
    (folder / "loss").mkdir(parents=True)
    (folder / "loss" / "mine.yaml").write_text(f"_target_: {name}.MyLoss\npos_margin: 0.1\nneg_margin: 1.0\n")
    monkeypatch.setattr("sys.path", [path for path in __import__("sys").path if path])
    loss = composed("--config-dir", "my_conf", "loss=mine", "loss.neg_margin=0.5").loss
    assert loss._target_ == f"{name}.MyLoss"
    assert dict(loss)["neg_margin"] == 0.5


@pytest.fixture
def composed(train_configs):
    """Checked configurations as ``dmlbench train`` would run them."""

    def run(*arguments: str):
        found = train_configs(*arguments)
        for cfg in found:
            check(cfg.copy())
        return found[0] if len(found) == 1 else found

    return run


@pytest.mark.fast_sample(2)
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("CircleLoss", ("loss.m=0.3", "loss.gamma=64")),
        ("ContrastiveLoss", ("loss.neg_margin=0.7",)),
        ("SignalToNoiseRatioContrastiveLoss", ()),
        ("CosFaceLoss", (*PROXIES, "loss.scale=30")),
    ],
)
def test_a_loss_of_another_library_takes_its_own_arguments_alone(composed, name: str, arguments) -> None:
    cfg = composed(f"loss._target_={LOSSES}{name}", *arguments)

    expected = {argument.partition("=")[0].removeprefix("loss.") for argument in arguments}
    assert set(cfg.loss) - {"_target_"} == expected

    assert cfg.runtime.choices.loss == name
    assert f"-{name}-" in config_id(cfg)


def test_reducers_and_miners_come_by_their_names_as_well(composed) -> None:
    cfg = composed(
        "loss=triplet", "loss.reducer._target_=pytorch_metric_learning.reducers.ThresholdReducer",
        "loss.reducer.low=0.1", "miner._target_=pytorch_metric_learning.miners.TripletMarginMiner", "miner.margin=0.1",
    )  # fmt: skip
    assert cfg.loss.reducer.low == 0.1
    assert "margin" in cfg.loss  # the option's own component stays
    assert cfg.runtime.choices.loss == "triplet"
    assert dict(cfg.miner) == {"_target_": "pytorch_metric_learning.miners.TripletMarginMiner", "margin": 0.1}
    assert cfg.runtime.choices.miner == "TripletMarginMiner"


@pytest.mark.slow
def test_interpolated_values_and_the_option_s_own_component_stay(composed) -> None:
    cfg = composed("loss=proxy_anchor", f"loss._target_={LOSSES}ArcFaceLoss")
    assert set(cfg.loss) == {"_target_", "num_classes", "embedding_size"}
    own = composed("pooling=gmp_gsp")  # has gsp's component
    again = composed("pooling=gmp_gsp", f"pooling._target_={own.pooling._target_}")
    assert again.pooling == own.pooling
    assert again.runtime.choices.pooling == "gmp_gsp"


@pytest.mark.slow
def test_sweeps_exchange_components_and_timm_s_models_have_their_names(composed) -> None:
    configs = composed("-m", f"loss._target_={LOSSES}CircleLoss,{LOSSES}NTXentLoss", "fold=0")
    assert [cfg.runtime.choices.loss for cfg in configs] == ["CircleLoss", "NTXentLoss"]
    cfg = composed("backbone=timm", "backbone.name=resnet10t.c3_in1k", "backbone.pretrained=false")
    assert cfg.runtime.choices.backbone == "resnet10t.c3_in1k"


def test_help_describes_values_by_the_comments_of_the_command(command) -> None:
    out = command("data", "--help")
    assert "decode: true  # verify: look at every image; false counts only, in seconds\n" in out
    assert "glyphs_collage" not in out.partition("Values:")[2]
