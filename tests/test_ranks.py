"""What each of several processes does, without starting them."""

import pytest
import torch
from torch import nn

from dmlbench.cli.main import main
from dmlbench.ranks import ONE, Ranks, joined_ranks
from dmlbench.types import ConfigError


@pytest.mark.parametrize(
    ("count", "batch_size", "size"), [(96, 64, 2), (1000, 64, 3), (65, 32, 4), (7, 8, 2), (8, 2, 4)]
)
def test_ranks_embed_whole_batches_that_make_up_the_set(count: int, batch_size: int, size: int) -> None:
    rows = list(range(count))
    parts = [rows[Ranks(rank, size).rows_of_batches(count, batch_size)] for rank in range(size)]
    if -(-count // batch_size) < size:
        assert parts == [rows] * size
        return
    assert [row for part in parts for row in part] == rows
    assert all(part and part[0] % batch_size == 0 for part in parts)
    assert max(map(len, parts)) - min(map(len, parts)) <= 2 * batch_size


def test_gradients_that_all_ranks_compute_count_on_the_first_alone() -> None:
    for rank, expected in ((0, [3.0, 5.0]), (1, [1.0, 0.0])):
        ours, proxies, unused = (nn.Parameter(torch.ones(1)) for _ in range(3))
        ours.grad = torch.ones(1)
        with Ranks(rank, 2).first_only([ours, proxies, unused]):
            (2 * ours + 5 * proxies).backward()
        assert [float(ours.grad), float(proxies.grad)] == expected
        assert unused.grad is None


def test_own_draws_differ_between_ranks_and_leave_the_random_state() -> None:
    draws = []
    for ranks in (Ranks(0, 2), Ranks(1, 2)):
        torch.manual_seed(3)
        with ranks.own_draws(7, torch.device("cpu")):
            draws.append(torch.rand(3))
        after = torch.rand(3)
        torch.manual_seed(3)
        assert torch.equal(after, torch.rand(3))
    assert not torch.equal(*draws)
    torch.manual_seed(3)
    with ONE.own_draws(7, torch.device("cpu")):
        assert torch.equal(torch.rand(3), after)


def test_a_run_of_several_processes_needs_torchrun() -> None:
    with pytest.raises(
        ConfigError, match=r"fit.processes: got 2, expected 1, .* Start them with torchrun --nproc_per_node=2"
    ):
        joined_ranks(2, "cpu").__enter__()


@pytest.mark.parametrize(("name", "refused"), [("auto", False), ("cuda", False), ("cuda:0", True), ("cuda:1", True)])
def test_processes_of_torchrun_choose_their_gpus_themselves(
    monkeypatch: pytest.MonkeyPatch, name: str, refused: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.distributed, "rendezvous", lambda url: iter(()))  # ends it here, by StopIteration
    for key, value in {
        "TORCHELASTIC_RUN_ID": "none",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
    }.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(ConfigError if refused else RuntimeError, match="Set device=cuda" if refused else None):
        joined_ranks(2, name).__enter__()
    assert chosen == ([] if refused else [torch.device("cuda", 1)])


def test_torchrun_trains_one_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for arguments in (["train", "-m", "pooling=gap,gsp"], ["reproduce", "demo"]):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 2
        assert "expected train without -m" in capsys.readouterr().err
