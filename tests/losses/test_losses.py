"""Every loss of conf/ is the formula it names, in value and gradient; batches it cannot use have a stated outcome."""

import copy
import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from composed import composed
from omegaconf import OmegaConf
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning import regularizers
from torch import Tensor, nn
from torch.nn.functional import normalize

from dmlbench.components import component
from dmlbench.config import config_folder
from dmlbench.losses.arcface import ArcFace
from dmlbench.losses.contrastive_c1 import ContrastiveC1
from dmlbench.losses.margin_oodml import MarginOodml
from dmlbench.losses.objective import Objective, compares_with_classes
from dmlbench.losses.proxy_nca import ProxyNca
from dmlbench.losses.recall_at_k import RecallAtKSurrogate
from dmlbench.losses.snr import SnrDistance
from dmlbench.losses.soft_triple import SoftTriple
from dmlbench.types import ConfigError, ModelOutput

# Losses of vectors; those of AVSL's levels have tests of their own.
OPTIONS = sorted(path.stem for path in (config_folder() / "loss").glob("*.yaml") if "layered" not in path.stem)
MINED = [
    ["loss=triplet", "miner=semihard"],
    ["loss=triplet", "miner=hard"],
    ["loss=triplet", "miner=distance_weighted"],
    ["loss=multi_similarity", "miner=multi_similarity"],
    ["loss=margin_oodml", "miner=distance_weighted"],
    ["loss=margin_oodml", "miner=distance_weighted_oodml"],
    ["loss=margin_oodml", "miner=rho_distance_weighted"],
    ["loss=contrastive_c1", "miner=multi_similarity"],
    ["loss=margin", "loss.num_classes=${runtime.num_classes}"],
]
ALL = [[f"loss={option}", *(["loss.start_step=0"] if "xbm" in option else [])] for option in OPTIONS] + MINED
CLASSES, SIZE = 6, 16


def configured(overrides: list[str], num_classes: int = CLASSES, size: int = SIZE) -> Objective:
    cfg = composed(*overrides)
    OmegaConf.update(cfg, "runtime.num_classes", num_classes)
    OmegaConf.update(cfg, "runtime.embedding_size", size)
    torch.manual_seed(0)
    return Objective(component(cfg.loss), component(cfg.miner))


def take(objective: Objective, embeddings: Tensor, labels: Tensor) -> tuple[float, Tensor]:
    x = embeddings.clone().requires_grad_()
    value = objective(ModelOutput(x), labels, step=1)["loss"]
    value.backward()
    assert x.grad is not None
    return value.item(), x.grad


# Against recorded values of public code

TORCH = {
    "pml_contrastive_L2_pos0_neg0.3841": ["loss=contrastive"],
    "pml_contrastive_L2_pos0.2652_neg0.5409": [
        "loss=contrastive", "loss.pos_margin=0.2652", "loss.neg_margin=0.5409",
    ],
    "pml_triplet_all_m0.0961": ["loss=triplet"],
    "pml_triplet_semihard_m0.0961": ["loss=triplet", "miner=semihard"],
    "pml_triplet_hard_m0.0961": ["loss=triplet", "miner=hard"],
    "pml_triplet_all_m0.05": ["loss=triplet", "loss.margin=0.05"],
    "pml_triplet_semihard_m0.05": ["loss=triplet", "loss.margin=0.05", "miner=semihard"],
    "pml_triplet_hard_m0.05": ["loss=triplet", "loss.margin=0.05", "miner=hard"],
    "pml_ms_nominer_a2_b40_l0.5": ["loss=multi_similarity"],
    "pml_ms_miner0.1_a2_b40_l0.5": ["loss=multi_similarity", "miner=multi_similarity"],
    "pml_ms_nominer_a2_b50_l0.5": ["loss=multi_similarity", "loss.beta=50"],
    "pml_ms_miner0.1_a2_b50_l0.5": ["loss=multi_similarity", "loss.beta=50", "miner=multi_similarity"],
    "xbm_repo_ms_hardmining_a2_b40": ["loss=multi_similarity", "miner=multi_similarity"],
    "pml_proxynca_scale9": ["loss=proxy_nca_pp"],
    "pml_proxynca_scale1": ["loss=proxy_nca", "loss.assignment_probability=true"],
    "euwern_ProxyNCA_prob_scale3": ["loss=proxy_nca_pp"],
    "euwern_ProxyNCA_classic_scale3": ["loss=proxy_nca", "loss.softmax_scale=9"],
    "pml_normsoftmax_T0.11": ["loss=proxy_nca_gsp"],
    "pml_normsoftmax_T0.05556": ["loss=norm_softmax", "loss.temperature=0.05555555555555555"],
    "pml_proxyanchor_m0.1_a32": ["loss=proxy_anchor"],
    "official_proxyanchor_m0.1_a32": ["loss=proxy_anchor"],
    "pml_margin_m0.2_b1.2": ["loss=margin"],
    "pml_margin_perclass_beta": ["loss=margin", "loss.num_classes=${runtime.num_classes}"],
    "oodml_margin_perclass_beta_fixed_triplets": ["loss=margin_oodml"],
    "xbm_repo_contrastive_C1": ["loss=contrastive_c1"],
}  # fmt: skip
NOT_CONFIGURED = {"pml_contrastive_cos_pos1_neg0.5"}
GSP = {
    "contrastive_C2_pos0_neg0.3841": ["loss=contrastive"],
    "contrastive_C2_pos0.2652_neg0.5409": [
        "loss=contrastive", "loss.pos_margin=0.2652", "loss.neg_margin=0.5409",
    ],
    "contrastive_C1_margin0.5": ["loss=contrastive_c1", "loss.subtract_margins=true"],
    "triplet_margin0.0961": ["loss=triplet"],
    "multi_similarity_a2_b40_l0.5": ["loss=multi_similarity"],
    "proxy_nca_T0.11": ["loss=proxy_nca_gsp"],
    "proxy_anchor_d0.1_a32": ["loss=proxy_anchor"],
    "margin_a0.2_b1.2": ["loss=margin_gsp"],
}  # fmt: skip
RECORDED = {"losses_torch": TORCH, "losses_gsp_tf": GSP}


def _set_weights(objective: Objective, record: dict[str, np.ndarray], batch: str, name: str) -> nn.Parameter | None:
    """Give the loss the recorded proxies or boundaries; returns what has a recorded gradient."""
    parameters = dict(objective.loss.named_parameters())
    proxies = torch.tensor(record[f"{batch}_proxies"])
    if "proxies" in parameters:
        parameters["proxies"].data = proxies
        return parameters["proxies"]
    if "W" in parameters:
        parameters["W"].data = proxies.T.contiguous()
        return parameters["W"]
    if "perclass" in name:
        parameters["beta"].data = torch.linspace(0.6, 1.4, len(proxies), dtype=torch.float64)
        return parameters["beta"]
    return None


@pytest.mark.parametrize("batch", ["b0", "b1", "b2"])
@pytest.mark.parametrize(("file", "name"), [(file, name) for file, table in RECORDED.items() for name in table])
def test_equals_public_code(golden, request, file: str, name: str, batch: str) -> None:
    record = golden(file)
    if f"{batch}_{name}_loss" not in record:
        assert (name, batch) in [("xbm_repo_ms_hardmining_a2_b40", b) for b in ("b1", "b2")]  # that code fails there
        return
    objective = configured(RECORDED[file][name], *record[f"{batch}_proxies"].shape)
    weights = _set_weights(objective, record, batch, name)
    if "fixed_triplets" in name:
        triplets = tuple(torch.tensor(record[f"{batch}_triplets"]).long().T)
        objective.miner = lambda x, y: triplets
    if file == "losses_torch":  # is in float64, the other one in float32
        request.getfixturevalue("_float64_objective")
    embeddings, labels = torch.tensor(record[f"{batch}_embeddings"]), torch.tensor(record[f"{batch}_labels"]).long()
    value, gradient = take(objective, embeddings, labels)
    # ooDML's code casts to float32; the margin loss's initial 1.2 is a float32, too.
    loose = "margin_m0" in name or "oodml" in name
    rtol, atol = (1e-5, 1e-5) if file == "losses_gsp_tf" else (1e-6, 1e-7) if loose else (1e-8, 1e-9)
    np.testing.assert_allclose(value, record[f"{batch}_{name}_loss"], rtol=rtol, atol=atol)
    np.testing.assert_allclose(gradient.numpy(), record[f"{batch}_{name}_grad"], rtol=10 * rtol, atol=atol)
    if weights is not None:
        expected = record[f"{batch}_{name}_grad_proxies"]
        expected = expected if expected.shape == weights.shape else expected.T
        found = torch.zeros_like(weights) if weights.grad is None else weights.grad  # b2 has no positive pair
        np.testing.assert_allclose(found.numpy(), expected, rtol=10 * rtol, atol=atol)


def test_no_recorded_loss_is_left_out(golden_meta) -> None:
    for name, table in RECORDED.items():
        recorded = {case["loss"] for case in golden_meta(name)["cases"] if case["batch"] != "xbm"}
        assert recorded - set(table) <= NOT_CONFIGURED


# Against naive loops in float64

LABELS = torch.tensor([0, 1, 1, 2, 2, 2, 3, 3, 3, 3, 4])  # class 4 has one image


def batch_of(seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(CLASSES, SIZE, generator=generator, dtype=dtype)
    return centers[LABELS] + torch.randn(len(LABELS), SIZE, generator=generator, dtype=dtype) + 0.5


def naive_c1(x: Tensor, y: Tensor) -> Tensor:
    total = x.sum() * 0
    for i in range(len(x)):
        for j in range(len(x)):
            s = (x[i] @ x[j]) / x[i].norm() / x[j].norm()
            if i != j and y[i] == y[j] and s < 1 - 1e-5:
                total = total + 1 - s
            elif y[i] != y[j] and s > 0.5:
                total = total + s
    return total / len(x)


def naive_recall(x: Tensor, y: Tensor, *, ks: tuple[int, ...], count_query: bool) -> Tensor:
    x = x / x.norm(dim=1, keepdim=True)
    n, per_query = len(x), []
    for q in range(n):
        positives = [i for i in range(n) if i != q and y[i] == y[q]]
        if not positives:
            continue
        recalls = []
        for k, temperature in zip(ks, ks, strict=True):
            k = min(k, n)
            found = x.sum() * 0
            for i in positives:
                rank = x.sum() * 0 + 1
                for z in range(n):
                    if z != i and (count_query or z != q):
                        rank = rank + 1 / (1 + torch.exp(-(x[q] @ x[z] - x[q] @ x[i]) / 0.01))
                found = found + 1 / (1 + torch.exp(-(k - rank) / temperature))
            recalls.append(found.clamp(max=k) / min(k, len(positives)))
        per_query.append(1 - torch.stack(recalls).mean())
    return torch.stack(per_query).mean()


def naive_margin(x: Tensor, y: Tensor, beta: Tensor, nu: float) -> Tensor:
    x = x / x.norm(dim=1, keepdim=True)
    total, count = x.sum() * 0, 0
    for a in range(len(x)):
        for p in range(len(x)):
            for n in range(len(x)):
                if a != p and y[a] == y[p] and y[a] != y[n]:
                    pull = torch.sqrt((x[a] - x[p]).square().sum() + 1e-8) - beta[y[a]] + 0.2
                    push = beta[y[a]] - torch.sqrt((x[a] - x[n]).square().sum() + 1e-8) + 0.2
                    if pull > 0 or push > 0:
                        count += 1
                        total = total + pull.clamp(min=0) + push.clamp(min=0) + nu * beta[y[a]]
    return total / count


def naive_proxy_nca(x: Tensor, y: Tensor, proxies: Tensor, *, scale: float, whole: bool) -> Tensor:
    total = x.sum() * 0
    for i in range(len(x)):
        d = ((x[i] / x[i].norm()) - proxies / proxies.norm(dim=1, keepdim=True)).square().sum(1)
        others = [c for c in range(len(proxies)) if whole or c != y[i]]
        total = total - torch.log(torch.exp(-scale * d[y[i]]) / torch.exp(-scale * d[others]).sum())
    return total / len(x)


def naive_soft_triple(x: Tensor, y: Tensor, centers: Tensor) -> Tensor:
    x, centers = x / x.norm(dim=1, keepdim=True), centers / centers.norm(dim=2, keepdim=True)
    num_classes, per_class = centers.shape[:2]
    total = x.sum() * 0
    for i in range(len(x)):
        s = []
        for c in range(num_classes):
            each = centers[c] @ x[i]
            weight = torch.exp(each / 0.1) / torch.exp(each / 0.1).sum()
            s.append((weight * each).sum() - (0.01 if c == y[i] else 0))
        logits = 20 * torch.stack(s)
        total = total - torch.log(torch.exp(logits[y[i]]) / torch.exp(logits).sum())
    spread = x.sum() * 0
    for c in range(num_classes):
        for k in range(per_class):
            for j in range(k + 1, per_class):
                spread = spread + torch.sqrt(2 + 1e-5 - 2 * centers[c, k] @ centers[c, j])
    return total / len(x) + 0.2 * spread / (num_classes * per_class * (per_class - 1))


def naive_supcon(x: Tensor, y: Tensor) -> Tensor:
    x = x / x.norm(dim=1, keepdim=True)
    values = []
    for i in range(len(x)):
        others = [j for j in range(len(x)) if j != i]
        positives = [j for j in others if y[j] == y[i]]
        if positives:
            whole = torch.log(sum(torch.exp(x[i] @ x[j] / 0.1) for j in others))
            values.append(sum(whole - x[i] @ x[j] / 0.1 for j in positives) / len(positives))
    return torch.stack(values).mean()


def _cases() -> dict[str, tuple[nn.Module, Callable[[Tensor, Tensor], Tensor]]]:
    torch.manual_seed(0)
    margin = MarginOodml(CLASSES, nu=0.1).double()
    margin.beta.data = torch.linspace(0.9, 1.3, CLASSES, dtype=torch.float64)
    classic, whole = ProxyNca(CLASSES, SIZE).double(), ProxyNca(CLASSES, SIZE, softmax_scale=9).double()
    whole.assignment_probability = True
    soft = SoftTriple(CLASSES, SIZE, centers_per_class=3).double()
    ks = (1, 2, 4, 16)
    recall = {c: RecallAtKSurrogate(ks, ks, count_query=c) for c in (True, False)}
    return {
        "contrastive_c1": (ContrastiveC1(), naive_c1),
        "recall_at_k": (recall[True], lambda x, y: naive_recall(x, y, ks=ks, count_query=True)),
        "recall_at_k without the query": (recall[False], lambda x, y: naive_recall(x, y, ks=ks, count_query=False)),
        "margin_oodml": (margin, lambda x, y: naive_margin(x, y, margin.beta, 0.1)),
        "proxy_nca": (classic, lambda x, y: naive_proxy_nca(x, y, classic.proxies, scale=1, whole=False)),
        "proxy_nca, all": (whole, lambda x, y: naive_proxy_nca(x, y, whole.proxies, scale=9, whole=True)),
        "soft_triple": (soft, lambda x, y: naive_soft_triple(x, y, soft.centers)),
        "supcon": (pml.SupConLoss(0.1), naive_supcon),
    }


@pytest.mark.parametrize("name", _cases())
def test_equals_a_naive_loop(name: str) -> None:
    loss, naive = _cases()[name]
    results = []
    for function in (loss, naive):
        x = batch_of().requires_grad_()
        loss.zero_grad()
        value = function(x, LABELS)
        value.backward()
        results.append([value.detach(), x.grad, *(p.grad.clone() for p in loss.parameters())])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


def test_contrastive_c1_variants_have_the_same_gradient() -> None:
    x = batch_of().requires_grad_()
    for subtract in (False, True):
        ContrastiveC1(subtract_margins=subtract)(x, LABELS).backward()
    once = batch_of().requires_grad_()
    ContrastiveC1()(once, LABELS).backward()
    torch.testing.assert_close(x.grad, 2 * once.grad)
    continuous = ContrastiveC1(subtract_margins=True)
    assert torch.autograd.gradcheck(lambda x: continuous(x, LABELS), (batch_of().requires_grad_(),), fast_mode=True)


def test_contrastive_c1_takes_pairs_triplets_and_references() -> None:
    loss, x = ContrastiveC1(), batch_of()
    same = LABELS[:, None] == LABELS[None]
    pairs = (*torch.where(same & ~torch.eye(len(x), dtype=torch.bool)), *torch.where(~same))
    torch.testing.assert_close(loss(x, LABELS, pairs), loss(x, LABELS))
    triplet = (torch.tensor([1]), torch.tensor([2]), torch.tensor([3]))
    one_pair_each = (torch.tensor([1]), torch.tensor([2]), torch.tensor([1]), torch.tensor([3]))
    torch.testing.assert_close(loss(x, LABELS, triplet), loss(x, LABELS, one_pair_each))
    # With itself as references, what is left out by index is left out by similarity.
    torch.testing.assert_close(loss(x, LABELS, None, x.clone(), LABELS), loss(x, LABELS))


def test_centers_of_soft_triple_start_as_in_its_code() -> None:
    bound = (100 * 10) ** -0.5  # idstcv/SoftTriple, loss/SoftTriple.py:24, kaiming_uniform_(fc [D, C K], a=sqrt(5))
    largest = SoftTriple(100, SIZE).centers.abs().max()
    assert 0.99 * bound < largest <= bound


def test_soft_triple_equals_pml_where_that_fits_into_memory() -> None:
    ours = SoftTriple(CLASSES, SIZE).double()
    theirs = pml.SoftTripleLoss(
        CLASSES, SIZE, weight_regularizer=regularizers.SparseCentersRegularizer(CLASSES, 10), weight_reg_weight=0.2
    )
    theirs.fc.data = ours.centers.data.flatten(0, 1).T.contiguous()
    # 1e-5 under the root is the authors', PML has a smaller one.
    torch.testing.assert_close(ours(batch_of(), LABELS), theirs(batch_of(), LABELS), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("at", ["anywhere", "beyond pi - m"])
def test_arcface_equals_pml(at: str) -> None:
    torch.manual_seed(0)
    ours, theirs = ArcFace(CLASSES, SIZE).double(), pml.ArcFaceLoss(CLASSES, SIZE).double()
    results = []
    for loss in (ours, theirs):
        loss.W.data = ours.W.data.clone()
        x = (batch_of() if at == "anywhere" else batch_of() * 0.05 - loss.W.T[LABELS].detach()).requires_grad_()
        value = loss(x, LABELS)
        value.backward()
        results.append((value.detach(), x.grad, loss.W.grad))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("sign", [1, -1])
def test_arcface_is_finite_where_an_embedding_meets_its_class(sign: int) -> None:
    loss = ArcFace(CLASSES, SIZE)
    x = (sign * 3 * loss.W.T[LABELS].detach()).requires_grad_()
    value = loss(x, LABELS)
    value.backward()
    assert torch.isfinite(value) and torch.isfinite(x.grad).all() and torch.isfinite(loss.W.grad).all()


def test_margins_reductions_differ_as_said() -> None:
    """A triplet with two terms counts once in ooDML's mean, twice in PML's."""
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.8, 0.6]])
    y, triplet = torch.tensor([0, 0, 1]), (torch.tensor([0]), torch.tensor([1]), torch.tensor([2]))
    ours, theirs = MarginOodml(2, beta=1.2)(x, y, triplet), pml.MarginLoss(beta=1.2)(x, y, triplet)
    assert ours.item() == pytest.approx(math.sqrt(2) - math.sqrt(0.4) + 0.4, rel=1e-6)
    assert ours.item() == pytest.approx(2 * theirs.item(), rel=1e-6)


# Batches that cannot be used as they are

NEEDS_OTHER_CLASSES = {  # 0 for one class
    *("margin", "margin_oodml", "multi_similarity_oodml", "pairwise_cross_entropy", "smooth_ap", "sup_ap", "supcon"),
    *("circle", "lifted_structure", "nt_xent", "triplet"),
}
NEEDS_POSITIVES = NEEDS_OTHER_CLASSES | {
    *("contrastive", "contrastive_c1", "fast_ap", "recall_at_k_surrogate", "roadmap")
}
OF_CLASSES = {"diva", "margin_oodml"}  # compare images, by boundaries of their classes
OF_BOTH = [overrides for overrides in ALL if overrides != ["loss=diva"]]  # which refuses a batch without triplets


def _name(overrides: list[str]) -> str:
    return overrides[0].removeprefix("loss=")


@pytest.mark.fast_sample(8)
@pytest.mark.parametrize("overrides", OF_BOTH, ids=" ".join)
def test_one_class_in_the_batch(overrides: list[str]) -> None:
    value, gradient = take(configured(overrides), batch_of(dtype=torch.float32), torch.zeros(11, dtype=torch.long))
    assert math.isfinite(value) and torch.isfinite(gradient).all()
    if _name(overrides) in NEEDS_OTHER_CLASSES:
        assert value == 0 and gradient.abs().max() < 1e-7
    elif len(overrides) == 1:
        assert value > 0 and gradient.any()


@pytest.mark.fast_sample(8)
@pytest.mark.parametrize("overrides", OF_BOTH, ids=" ".join)
def test_one_image_of_each_class(overrides: list[str]) -> None:
    x = torch.eye(CLASSES, SIZE) + 0.01 * batch_of(dtype=torch.float32)[:CLASSES]  # nearly orthogonal
    value, gradient = take(configured(overrides), x, torch.arange(CLASSES))
    assert math.isfinite(value) and torch.isfinite(gradient).all()
    if _name(overrides) in NEEDS_POSITIVES | {"xbm", "xbm_contrastive"}:
        assert value == 0 and not gradient.any()
    elif compares_with_classes(configured(overrides).loss):
        assert value != 0 and gradient.any()


@pytest.mark.fast_sample(12)
@pytest.mark.parametrize("overrides", ALL, ids=" ".join)
@pytest.mark.parametrize("shift", [1, -1])
def test_labels_outside_of_the_classes(overrides: list[str], shift: int, caplog: pytest.LogCaptureFixture) -> None:
    objective, x = configured(overrides), batch_of(dtype=torch.float32)
    labels = torch.arange(len(x)) % CLASSES + shift
    if compares_with_classes(objective.loss) or "num_classes" in overrides[-1] or _name(overrides) in OF_CLASSES:
        assert not caplog.records
        objective.check_labels(torch.tensor([0, 4]))
        assert "loss.num_classes: got 6, but labels are 0 to 4, so 1 have no image" in caplog.text
        caplog.clear()
        with pytest.raises(ConfigError, match=r"loss\.num_classes: got 6, but labels are"):
            objective.check_labels(labels)
    else:  # pairs ask only whether labels are equal
        objective.check_labels(labels)
        assert take(objective, x, labels)[0] == pytest.approx(take(configured(overrides), x, labels - shift)[0])


@pytest.mark.fast_sample(10)
@pytest.mark.parametrize("overrides", ALL, ids=" ".join)
def test_finite_embeddings_give_finite_values_and_gradients(overrides: list[str]) -> None:
    """Random batches of norms 1e-6 to 1e6, of equal, opposite and collapsed rows, rows upon a class's vector, zeros.

    A row of zeros has no direction: it counts as orthogonal to all, and its gradient is large but finite.
    """
    objective = configured(overrides)
    vectors = torch.eye(CLASSES, SIZE)
    for name, parameter in objective.loss.named_parameters():
        if name in ("W", "proxies"):
            vectors = (parameter.T if name == "W" else parameter).detach()
        elif name == "centers":
            vectors = parameter[:, 0].detach()
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        kind = seed % 6
        x = normalize(torch.randn(12, SIZE, generator=generator))
        y = torch.arange(12) // 2 if seed % 2 else torch.randint(0, CLASSES, (12,), generator=generator)
        if kind == 1:
            x = x[:1].expand(12, -1)
        elif kind == 2:
            x = x[:1] * torch.tensor([1.0, -1.0]).repeat(6)[:, None]
        elif kind == 3:
            x = normalize(vectors)[y]
        elif kind == 4:
            x = normalize(vectors)[y] + 1e-4 * x
        x = x * 10 ** (torch.rand(12, 1, generator=generator) * 12 - 6)
        for rows in (x, x.index_fill(0, torch.tensor([3]), 0.0), x * 0):
            value, gradient = take(copy.deepcopy(objective), rows, y)
            assert math.isfinite(value) and torch.isfinite(gradient).all(), (seed, value)


class _Own(nn.Module):
    """A loss that returns what ``value`` makes of the embeddings."""

    def __init__(self, value: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.value = value

    def forward(self, embeddings: Tensor, labels: Tensor, indices_tuple: object = None) -> object:
        return self.value(embeddings)


class _WithoutPairs(_Own):
    def forward(self, embeddings: Tensor, labels: Tensor) -> object:
        return self.value(embeddings)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda x: x.sum(dim=1), r"_Own: returned a tensor of shape \[11\], expected a scalar\. Return its mean"),
        (lambda x: x.sum().item(), "_Own: returned float, expected a scalar tensor"),
        (lambda x: x.detach().sum(), "_Own: returned a value without gradient"),
    ],
)
def test_a_loss_that_returns_no_loss_is_refused(value: Callable[[Tensor], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        take(Objective(_Own(value)), batch_of(dtype=torch.float32), LABELS)


def test_a_loss_that_cannot_take_pairs_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"_WithoutPairs\.forward: got .*, expected \(embeddings, labels, indices_tup"
    ):
        Objective(_WithoutPairs(torch.sum))


@pytest.mark.fast_sample(6)
@pytest.mark.parametrize("option", OPTIONS)
def test_a_miner_with_a_loss_that_takes_no_pairs_is_refused(option: str) -> None:
    if compares_with_classes(configured([f"loss={option}"]).loss):
        with pytest.raises(ConfigError, match=r"compares images with class vectors, not pairs\. Set miner=null"):
            configured([f"loss={option}", "miner=multi_similarity"])
    if option in ("recall_at_k_surrogate", "multi_similarity_oodml", "pairwise_cross_entropy", "smooth_ap"):
        objective = configured([f"loss={option}", "miner=multi_similarity"])
        with pytest.raises(ConfigError, match=r"takes no pairs\. Set miner=null"):
            take(objective, batch_of(dtype=torch.float32), LABELS)


# Losses of PML, each by the formula of its header


def naive_circle(x: Tensor, y: Tensor) -> Tensor:
    s, values = normalize(x) @ normalize(x).T, []
    for a in range(len(y)):
        positive = [
            -80 * max(1.4 - float(s[a, i]), 0) * (s[a, i] - 0.6) for i in range(len(y)) if y[i] == y[a] and i != a
        ]
        negative = [80 * max(float(s[a, i]) + 0.4, 0) * (s[a, i] - 0.4) for i in range(len(y)) if y[i] != y[a]]
        if positive and negative:
            total = torch.stack(positive).logsumexp(0) + torch.stack(negative).logsumexp(0)
            values.append(torch.nn.functional.softplus(total))
    return _mean_of_non_zero(values)


def naive_lifted_structure(x: Tensor, y: Tensor) -> Tensor:
    x, values = normalize(x), []
    d = [[(a - b).norm() if i != j else a.sum() * 0 for j, b in enumerate(x)] for i, a in enumerate(x)]
    for i, j in itertools.permutations(range(len(y)), 2):
        if y[i] == y[j]:
            near = [1 - d[end][n] for end in (i, j) for n in range(len(y)) if y[n] != y[i]]
            values.append((d[i][j] + torch.stack(near).logsumexp(0)).clamp(min=0) ** 2 / 2)
    return torch.stack(values).mean()


def naive_nt_xent(x: Tensor, y: Tensor) -> Tensor:
    s, values = normalize(x) @ normalize(x).T / 0.07, []
    for i, j in itertools.permutations(range(len(y)), 2):
        if y[i] == y[j]:
            negative = [s[i, n] for n in range(len(y)) if y[n] != y[i]]
            values.append(torch.stack([s[i, j], *negative]).logsumexp(0) - s[i, j])
    return torch.stack(values).mean()


def naive_snr_contrastive(x: Tensor, y: Tensor) -> Tensor:
    x, positive, negative = normalize(x), [], []
    for i, j in itertools.permutations(range(len(y)), 2):
        d = (x[i] - x[j]).var() / x[i].var()
        (positive if y[i] == y[j] else negative).append(d if y[i] == y[j] else (1 - d).clamp(min=0))
    return _mean_of_non_zero(positive) + _mean_of_non_zero(negative)


def naive_fast_ap(x: Tensor, y: Tensor) -> Tensor:
    x, values = normalize(x), []
    for a in range(len(y)):
        bins = []  # positives and all images of each bin
        for center in torch.linspace(0, 4, 11, dtype=x.dtype):
            weights = [(1 - ((x[a] - x[i]).square().sum() - center).abs() / 0.4).clamp(min=0) for i in range(len(y))]
            positive = sum(w for i, w in enumerate(weights) if i != a and y[i] == y[a])
            bins.append((positive, positive + sum(w for i, w in enumerate(weights) if y[i] != y[a])))
        number = int((y == y[a]).sum()) - 1
        if number:
            seen_positive = seen = ap = x.sum() * 0
            for positive, whole in bins:
                seen_positive, seen = seen_positive + positive, seen + whole
                ap = ap + (positive * seen_positive / seen if float(seen_positive) > 0 else 0)
            values.append(1 - ap / number)
    return torch.stack(values).mean()


def naive_softmax(x: Tensor, y: Tensor, logits_of: Callable[[Tensor, int], list[Tensor]]) -> Tensor:
    rows = [torch.stack(logits_of(normalize(row, dim=0), int(label))) for row, label in zip(x, y, strict=True)]
    return torch.stack([row.logsumexp(0) - row[label] for row, label in zip(rows, y, strict=True)]).mean()


def _mean_of_non_zero(values: list[Tensor]) -> Tensor:
    return torch.stack([value for value in values if float(value) > 0]).mean()


NAIVE = {
    "circle": naive_circle, "lifted_structure": naive_lifted_structure, "nt_xent": naive_nt_xent,
    "snr_contrastive": naive_snr_contrastive, "fast_ap": naive_fast_ap,
}  # fmt: skip


@pytest.mark.parametrize("option", NAIVE)
def test_an_option_of_pml_equals_its_formula(option: str) -> None:
    loss, results = configured([f"loss={option}"]).loss, []
    for function in (loss, NAIVE[option]):
        x = batch_of().requires_grad_()
        value = function(x, LABELS)
        results.append((value.detach(), *torch.autograd.grad(value, x)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


def test_snr_distance_divides_by_the_variance_of_the_first_argument() -> None:
    x, y = batch_of()[:3], batch_of(seed=1)[:3]
    expected = torch.tensor([[float((a - b).numpy().var() / a.numpy().var()) for b in y] for a in x]).double()
    distance = SnrDistance(normalize_embeddings=False)
    torch.testing.assert_close(distance(x, y), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(distance.pairwise_distance(x, y), expected.diag(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("option", ["cosface", "sub_center_arcface"])
def test_margins_of_softmax_equal_their_formulas(option: str) -> None:
    loss = configured([f"loss={option}"]).loss.double()

    def logits_of(row: Tensor, label: int) -> list[Tensor]:
        vectors = normalize(loss.W, dim=0).T.reshape(CLASSES, -1, SIZE)  # [C, K, D]
        cosines = [max(vector @ row for vector in each) for each in vectors]
        if option == "cosface":
            return [64 * (s - 0.35 * (c == label)) for c, s in enumerate(cosines)]
        return [64 * (s if c != label else torch.cos(s.acos() + math.radians(28.6))) for c, s in enumerate(cosines)]

    results = []
    for function in (loss, lambda x, y: naive_softmax(x, y, logits_of)):
        x = batch_of().requires_grad_()
        value = function(x, LABELS)
        results.append((value.detach(), *torch.autograd.grad(value, [x, loss.W])))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
