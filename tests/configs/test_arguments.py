"""The command line as users write it: order, lists, names of files, and mistakes answered in one line."""

import re
from pathlib import Path

import pytest

from dmlbench.cli.arguments import for_hydra, parse
from dmlbench.cli.main import COMMANDS, main
from dmlbench.cli.oodml import WORDS
from dmlbench.cli.study import STUDIES
from dmlbench.schemas import SCHEMAS


def hydra_takes(command: str, *arguments: str) -> list[str]:
    return for_hydra(command, parse(command, arguments))


def dmlbench(capsys, *arguments: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as info:
        main(arguments)
    out, error = capsys.readouterr()
    assert info.value.code == code, error
    assert "Traceback" not in error
    return out if code == 0 else error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pooling=[gap]"], "an option of pooling is chosen by its name, such as pooling="),
        (["~pooling"], "every run needs a pooling"),
        (["hydra=null"], "hydra is no group"),
        (["omniglot/*"], "'omniglot/*' is no key=value; see dmlbench train --help"),
        (["=3"], "'=3' names no key"),
        (["fold==3"], "fold==3 cannot be read"),
        (["fold=["], "fold=[ cannot be read"),
        (["pooling=gap,gmp"], "pooling=gap,gmp gives several values: -m runs each of them"),
        (["loss.alpha={}"], "loss.alpha is {} (dict), but"),
        (["--fold", "1"], "--fold: values are written without dashes, fold=<value>"),
        (["--fast"], "unknown option --fast: the options are --help"),
        (["--config-dir"], "--config-dir needs a value"),
        (["--config-dir", "nowhere"], "--config-dir nowhere: there is no such folder"),
        (["--config-dir=a", "--config-dir=b"], "--config-dir is given 2 times (a, b)"),
        (["optm.lr=1"], "no key 'optm': did you mean 'optim'? known: "),
        (["fold="], "fold: Value '' of type 'str' could not be converted to Integer\n"),
    ],
)
def test_a_mistake_is_one_line_without_hydra_s_inner_workings(
    capsys, tmp_path, monkeypatch, arguments, message
) -> None:
    monkeypatch.chdir(tmp_path)
    error = dmlbench(capsys, "train", *arguments, code=2)
    assert message in error
    assert len(error.splitlines()) == 1
    assert "hydra.cc" not in error and "Lexer" not in error
    assert not list(tmp_path.iterdir())


def test_options_stand_anywhere_and_several_regularizers_compose(tmp_path: Path) -> None:
    line = parse("train", ["a=1", "-m", "--config-dir", str(tmp_path), "b=2", "--cfg=job", "~c"])
    assert (line.options, line.config_dir, line.overrides) == (("-m", "--cfg", "job"), tmp_path, ("a=1", "b=2", "~c"))
    assert line.is_sweep
    for kept in ("regularizer=[zsr,xml]", "pooling=glob(*,exclude=none)", "pooling=choice(gap,gmp)"):
        assert hydra_takes("train", "-m", kept) == [kept]
    assert hydra_takes("train", "fit.max_steps =3") == ["fit.max_steps=3"]


def test_lists_patterns_and_names_of_files_mean_the_same_in_every_command() -> None:
    for command in ("train", "evaluate"):
        assert hydra_takes(command, "recall_at=1,10")[0].endswith("recall_at=[1,10]")
    for command in ("aggregate", "table", "report"):
        assert hydra_takes(command, "metrics=p_at_1,recall_at_k", "recall_at=[1,10]") == [
            "metrics=['p_at_1','recall_at_k']", "recall_at=[1,10]"
        ]  # fmt: skip
    for command in ("aggregate", "table", "report", "status", "clean"):
        assert "cells" in SCHEMAS[command].__dataclass_fields__
        for argument in ("omniglot/*gsp*", "cells=omniglot/*gsp*"):
            assert hydra_takes(command, argument) == ["cells=omniglot/*gsp*"]
        assert hydra_takes(command, "cells=*/fold[01]_rep0") == ["cells='*/fold[01]_rep0'"]
    assert hydra_takes("table", "compare=*-gap-*,*-gsp-*") == ["compare=['*-gap-*','*-gsp-*']"]
    assert hydra_takes("evaluate", "run=out (1)/a,b=c") == ["run='out (1)/a,b=c'"]
    assert hydra_takes("data", "password=0123", "archives=a b (1).zip") == ["password='0123'", "archives='a b (1).zip'"]


LINES = [*(name for name in COMMANDS if name not in ("oodml", "study")), *(f"oodml {word}" for word in WORDS)]
LINES += [f"study {name}" for name in STUDIES]


@pytest.mark.parametrize(
    "command", [pytest.param(line, marks=() if line == "oodml splits" else pytest.mark.slow) for line in LINES]
)
def test_every_command_shows_examples_of_its_own_and_lists_the_keys_that_it_knows(
    capsys, tmp_path, monkeypatch, command
):
    monkeypatch.chdir(tmp_path)
    line = command.split()
    shown = dmlbench(capsys, *line, "--help")
    assert len(re.findall(rf"^  dmlbench {command}\b", shown, re.MULTILINE)) >= 2
    assert "--queries" not in shown and "--yes" not in shown
    words = [*line, *(["verify", "glyphs"] if command == "data" else [])]
    error = dmlbench(capsys, *words, "nonsense=1", code=2)
    assert "no key 'nonsense': " in error and len(error.splitlines()) == 1
    for key in SCHEMAS[command.replace(" ", "_")].__dataclass_fields__:
        assert key in error.partition("known: ")[2]
    error = dmlbench(capsys, *words, "--nonsense", code=2)
    assert "unknown option --nonsense" in error


@pytest.mark.parametrize("order", ["before", "after", "equals"])
def test_a_module_beside_the_user_s_configuration_is_found(capsys, tmp_path, monkeypatch, order) -> None:
    """Folder and module lie side by side; the place of ``--config-dir`` on the line does not matter."""
    name = f"my_module_{order}"
    (tmp_path / f"{name}.py").write_text(
        "from pytorch_metric_learning.losses import ContrastiveLoss\nclass MyLoss(ContrastiveLoss):\n    pass\n"
    )
    folder = tmp_path / "my_conf"
    (folder / "loss").mkdir(parents=True)
    (folder / "loss" / "mine.yaml").write_text(f"_target_: {name}.MyLoss\npos_margin: 0.1\nneg_margin: 1.0\n")
    monkeypatch.chdir(tmp_path)
    taken = []

    def run(cfg) -> str:
        from dmlbench.build import check

        check(cfg)
        taken.append(cfg.loss)
        return "nowhere"

    monkeypatch.setattr("dmlbench.one_run.run", run)
    monkeypatch.setattr("sys.path", [path for path in __import__("sys").path if path])
    option = ["--config-dir=my_conf"] if order == "equals" else ["--config-dir", "my_conf"]
    rest = ["loss=mine", "loss.neg_margin=0.5"]
    dmlbench(capsys, "train", *([*rest, *option] if order == "after" else [*option, *rest]))
    assert taken[0]._target_ == f"{name}.MyLoss"
    assert dict(taken[0])["neg_margin"] == 0.5


@pytest.mark.parametrize(("command", "prefix"), [("table", ""), ("train", "evaluation.")])
def test_one_value_of_a_list_is_a_list(command: str, prefix: str) -> None:
    given = ["metrics=p_at_1", "recall_at=10", f"{prefix}metrics=null", f"{prefix}recall_at=[1]"]
    taken = for_hydra(command, parse(command, given))
    assert taken[:2] == [f"{prefix}metrics=['p_at_1']", f"{prefix}recall_at=[10]"]
    assert taken[2:] == given[2:]
