"""Cross-batch memory: equal to the published codes step by step, resumable, and refused where it cannot work."""

import copy
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from pytorch_metric_learning import losses, miners
from torch import Tensor

from dmlbench.components import component
from dmlbench.config import compose, config_folder
from dmlbench.losses.contrastive_c1 import ContrastiveC1
from dmlbench.losses.miners import DistanceWeighted
from dmlbench.losses.objective import Objective
from dmlbench.losses.xbm import CrossBatchMemory
from dmlbench.types import ConfigError, ModelOutput


def steps(memory: CrossBatchMemory, embeddings: np.ndarray, labels: np.ndarray) -> Iterator[tuple[float, np.ndarray]]:
    """Value and gradient of consecutive steps."""
    for i, (x, y) in enumerate(zip(torch.tensor(embeddings), torch.tensor(labels).long(), strict=True), start=1):
        x = x.requires_grad_()
        memory.observe(x, y, step=i)
        value = memory(x, y)
        value.backward()
        assert x.grad is not None
        yield value.item(), x.grad.numpy()


def batches(num: int = 9, batch: int = 4, size: int = 6) -> tuple[np.ndarray, np.ndarray]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num, batch, size, generator=generator, dtype=torch.float64)
    return (x + 0.5).numpy(), torch.randint(0, 3, (num, batch), generator=generator).numpy()


def test_equals_the_papers_code(golden) -> None:
    recorded = golden("xbm_torch")
    memory = CrossBatchMemory(ContrastiveC1(), 128, 10, start_step=0).double()
    filled = []
    for i, (value, gradient) in enumerate(steps(memory, recorded["embeddings"], recorded["labels"])):
        filled.append(int(memory.filled))
        expected = recorded["official_batch_loss"][i] + recorded["official_memory_loss"][i]
        np.testing.assert_allclose(value, expected, rtol=1e-8)
        np.testing.assert_allclose(gradient, recorded["official_grad_of_sum"][i], rtol=1e-8, atol=1e-12)
    assert filled == recorded["official_memory_rows"].tolist()


def test_equals_the_gsp_framework(golden) -> None:
    recorded = golden("losses_gsp_tf", "xbm_")
    memory = CrossBatchMemory(
        ContrastiveC1(subtract_margins=True), 6, 12, start_step=2, variant="gsp", placement="ring"
    )
    found = list(steps(memory, recorded["embeddings"], recorded["labels"]))
    np.testing.assert_allclose([value for value, _ in found], recorded["losses"], atol=1e-5)
    np.testing.assert_allclose(np.stack([gradient for _, gradient in found]), recorded["grads"], atol=1e-5)


def naive(x: np.ndarray, y: np.ndarray, rows: list, own: list[int], loss_of_pair) -> float:
    """Sum over ordered pairs with the memory but an image's own row, divided by the batch."""
    total = 0.0
    for i in range(len(x)):
        for slot, entry in enumerate(rows):
            if entry is not None and slot != own[i]:
                row, label = entry
                s = x[i] @ row / np.linalg.norm(x[i]) / np.linalg.norm(row)
                total += loss_of_pair(s, y[i] == label)
    return total / len(x)


def c1(s: float, same: bool) -> float:
    return (1 - s if s < 1 - 1e-5 else 0.0) if same else (s if s > 0.5 else 0.0)


@pytest.mark.parametrize("size", [4, 8, 10, 11])
@pytest.mark.parametrize("placement", ["official", "ring"])
@pytest.mark.parametrize(("variant", "start"), [("paper", 0), ("paper", 3), ("gsp", 2)])
def test_equals_a_naive_loop(variant: str, start: int, placement: str, size: int) -> None:
    embeddings, labels = batches()
    memory = CrossBatchMemory(
        ContrastiveC1(), 6, size, weight=0.7, start_step=start, variant=variant, placement=placement
    ).double()
    rows: list = [None] * size
    pointer = 0
    found = list(steps(memory, embeddings, labels))
    for i, (x, y) in enumerate(zip(embeddings, labels, strict=True)):
        own = []
        if i + 1 > start:
            if placement == "official" and pointer + 4 > size:
                own, pointer = list(range(size - 4, size)), 0
                rows = [entry or (np.full(6, 1e-300), -1) for entry in rows]
            else:
                own = [(pointer + j) % size for j in range(4)]
                pointer = pointer + 4 if placement == "official" else (pointer + 4) % size
            for j, slot in enumerate(own):
                rows[slot] = (x[j], y[j])
        expected = naive(x, y, [(row, label) for row, label in zip(x, y, strict=True)], list(range(4)), c1)
        if i + 1 > start and (variant == "paper" or all(rows)):
            expected += 0.7 * naive(x, y, rows, own, c1)
        assert found[i][0] == pytest.approx(expected, rel=1e-12), i


def test_masks_and_lists_of_pairs_give_the_same() -> None:
    class Lists(torch.nn.Module):  # hides the masks
        def __init__(self) -> None:
            super().__init__()
            self.inner = ContrastiveC1()

        def forward(self, embeddings, labels, indices_tuple=None, ref_emb=None, ref_labels=None) -> Tensor:
            return self.inner(embeddings, labels, indices_tuple, ref_emb, ref_labels)

    embeddings, labels = batches()
    of_masks = steps(CrossBatchMemory(ContrastiveC1(), 6, 10, start_step=1).double(), embeddings, labels)
    of_lists = steps(CrossBatchMemory(Lists(), 6, 10, start_step=1).double(), embeddings, labels)
    for (a, gradient_a), (b, gradient_b) in zip(of_masks, of_lists, strict=True):
        assert a == pytest.approx(b, rel=1e-13)
        np.testing.assert_allclose(gradient_a, gradient_b, rtol=1e-12, atol=1e-14)


WRAPPED = {
    "multi_similarity": losses.MultiSimilarityLoss(),
    "contrastive": losses.ContrastiveLoss(),
    "supcon": losses.SupConLoss(),
    "margin": losses.MarginLoss(learn_beta=True),
    "triplet": losses.TripletMarginLoss(),
}


@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.parametrize("miner", [None, miners.MultiSimilarityMiner(), miners.TripletMarginMiner()])
def test_memory_part_of_any_loss_is_pmls(name: str, miner) -> None:
    embeddings, labels = batches()
    mine = CrossBatchMemory(
        WRAPPED[name], 6, 10, start_step=0, placement="ring", normalize_rows=False, memory_miner=miner
    ).double()
    theirs = losses.CrossBatchMemory(copy.deepcopy(WRAPPED[name]), 6, memory_size=10, miner=miner).double()
    for i, (x, y) in enumerate(zip(torch.tensor(embeddings), torch.tensor(labels), strict=True), start=1):
        mine.observe(x, y, step=i)
        torch.testing.assert_close(mine.memory_part(x, y), theirs(x, y))


def test_resumes_exactly() -> None:
    embeddings, labels = batches()
    whole = CrossBatchMemory(ContrastiveC1(), 6, 10, start_step=1).double()
    expected = list(steps(whole, embeddings, labels))
    for stop in range(1, len(labels)):
        first = CrossBatchMemory(ContrastiveC1(), 6, 10, start_step=1).double()
        list(steps(first, embeddings[:stop], labels[:stop]))
        again = CrossBatchMemory(ContrastiveC1(), 6, 10, start_step=1).double()
        again.load_state_dict(copy.deepcopy(first.state_dict()))
        for i in range(stop, len(labels)):
            x, y = torch.tensor(embeddings[i]), torch.tensor(labels[i])
            again.observe(x, y, step=i + 1)
            assert again(x, y).item() == expected[i][0]
    assert {"rows", "labels", "pointer", "filled"} == set(whole.state_dict())


def test_objective_fills_the_memory_once_a_step_and_for_training_alone() -> None:
    embeddings, labels = (torch.tensor(x) for x in batches())
    objective = Objective(CrossBatchMemory(ContrastiveC1(), 6, 8, start_step=1))
    memory = objective.loss
    assert isinstance(memory, CrossBatchMemory)
    plain = [ContrastiveC1()(x.float(), y).item() for x, y in zip(embeddings, labels, strict=True)]
    values = []
    for step in (1, 2, 3):
        values.append(objective(ModelOutput(embeddings[step]), labels[step], step=step)["loss"].item())
        assert int(memory.filled) == 4 * (step - 1)
    assert values[:2] == pytest.approx([plain[1], 2 * plain[2]])  # at step 2 the memory holds that batch alone
    assert values[2] > 2 * plain[3]
    state = copy.deepcopy(objective.state_dict())
    assert objective._plain_loss(embeddings[5].float(), labels[5]).item() == pytest.approx(plain[5])
    objective.eval()
    assert objective(ModelOutput(embeddings[3]), labels[3], step=4)["loss"].item() == pytest.approx(plain[3])
    assert all(torch.equal(a, b) for a, b in zip(state.values(), objective.state_dict().values(), strict=True))


def test_part_of_a_memory_in_the_loss_is_told() -> None:
    objective = Objective(CrossBatchMemory(ContrastiveC1(), 6, 8, start_step=1, variant="gsp"))
    assert Objective(ContrastiveC1()).started
    for step in (1, 2, 3):
        assert not objective.started
        objective(ModelOutput(torch.eye(4, 6)), torch.tensor([0, 0, 1, 1]), step=step)
    assert objective.started


def test_a_miner_that_takes_no_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="memory_miner: got DistanceWeighted, which chooses within a batch"):
        CrossBatchMemory(ContrastiveC1(), 6, 8, memory_miner=DistanceWeighted())


def test_losses_of_pml_with_a_memory_resume_or_are_refused() -> None:
    with pytest.raises(ConfigError, match="Set loss=xbm"):
        Objective(losses.CrossBatchMemory(losses.ContrastiveLoss(), 6, memory_size=8))
    torch.manual_seed(0)
    batches = [(ModelOutput(torch.randn(8, 6)), torch.arange(4).repeat(2)) for _ in range(6)]
    whole, resumed = (Objective(losses.DynamicSoftMarginLoss()) for _ in range(2))
    for step, (output, labels) in enumerate(batches[:4], start=1):
        whole(output, labels, step=step)
    resumed.load_state_dict(whole.state_dict())
    for step, (output, labels) in enumerate(batches[4:], start=5):
        assert torch.equal(*(each(output, labels, step=step)["loss"] for each in (whole, resumed)))


PAIRS = {
    *("contrastive", "contrastive_c1", "margin", "margin_gsp", "margin_oodml", "multi_similarity", "supcon", "triplet"),
    *("circle", "lifted_structure", "nt_xent", "snr_contrastive"),
}
NO_PAIRS = {
    *("arcface", "libc", "norm_softmax", "proxy_anchor", "proxy_nca", "proxy_nca_gsp", "proxy_nca_pp", "soft_triple"),
    *("diva", "multi_similarity_oodml", "recall_at_k_surrogate"),
    *("cosface", "fast_ap", "sub_center_arcface"),
    *("hist", "pairwise_cross_entropy", "roadmap", "smooth_ap", "sup_ap"),
}


def test_every_configured_loss_is_known_here() -> None:
    options = {path.stem for path in (config_folder() / "loss").glob("*.yaml")}
    assert options == PAIRS | NO_PAIRS | {"xbm", "xbm_contrastive", "layered", "layered_proxy_anchor", "metrix"}


@pytest.mark.fast_sample(6)
@pytest.mark.parametrize("option", sorted(PAIRS | NO_PAIRS))
def test_every_loss_of_pairs_can_be_wrapped_and_no_other_one(option: str) -> None:
    cfg = compose("train", ["loss=xbm", f"loss@loss.loss={option}"])
    OmegaConf.update(cfg, "runtime.num_classes", 4)
    OmegaConf.update(cfg, "runtime.embedding_size", 8)
    if option in PAIRS:
        assert isinstance(component(cfg.loss), CrossBatchMemory)
    else:
        with pytest.raises(ConfigError, match="cannot compare a batch with a memory"):
            component(cfg.loss)
