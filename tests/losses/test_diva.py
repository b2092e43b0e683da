"""DiVA equals the public codes in value and gradient; its triplets come from where they should."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from dmlbench.losses import diva
from dmlbench.losses.diva import PARTS, Diva, drawn_triplets, unit_parts
from dmlbench.losses.diva_regularizers import PartDecorrelation, SelfSimilarity
from dmlbench.losses.miners import log_inverse_density
from dmlbench.types import ModelOutput

PUBLIC = dict(zip(PARTS, ("discriminative", "shared", "selfsimilarity", "intra"), strict=True))
OF_TRIPLETS = ("discriminative", "shared", "intra")
CASES = ("d0", "d1", "d2")
EXACT = {"rtol": 1e-8, "atol": 1e-12}


def no_loss(embeddings: Tensor, labels: Tensor) -> Tensor:
    raise AssertionError("it takes no loss of embeddings")


def similarity_of(values: dict[str, Tensor], meta: dict[str, float], **arguments) -> SelfSimilarity:
    made = SelfSimilarity(
        meta["alpha"], values["embeddings"].shape[1], queue_size=len(values["queue"]), temperature=meta["temperature"],
        **arguments,
    ).double()  # fmt: skip
    made.queue = values["queue"]
    made.set_count("filled", len(made.queue))
    return made


def output_of(values: dict[str, Tensor]) -> ModelOutput:
    """Embeddings, scaled by part, and keys whose other parts nobody reads."""
    rows = values["embeddings"].requires_grad_()
    keys = torch.randn(rows.shape, dtype=rows.dtype, generator=torch.Generator().manual_seed(5))
    size, at = values["keys"].shape[1], PARTS.index("self_similarity")
    keys[:, at * size : (at + 1) * size] = 3 * values["keys"]
    return ModelOutput(rows, {"keys": keys})


@pytest.mark.parametrize("case", CASES)
def test_the_whole_objective_equals_public_code(golden_tensors, golden_meta, monkeypatch, case: str) -> None:
    values, meta = golden_tensors("diva", f"{case}_"), golden_meta("diva")[case]
    output = output_of(values)
    size = output.embedding.shape[1]
    loss = Diva(meta["num_classes"], size, shared_weight=meta["alpha"], intra_weight=meta["alpha"]).double()
    given = iter(OF_TRIPLETS)
    monkeypatch.setattr(diva, "drawn_triplets", lambda *_: values[f"triplets_{next(given)}"].unbind(1))
    decorrelation = PartDecorrelation(meta["rho"], size, hidden_size=meta["hidden_size"]).double()
    for part, margin in loss.margins.items():
        margin.beta.data.copy_(values[f"beta_{PUBLIC[part]}"])
    for part, regressor in decorrelation.regressors.items():
        for name, parameter in regressor.named_parameters():
            parameter.data.copy_(values[f"{PUBLIC[part]}.{name}"])
    similarity = similarity_of(values, meta)
    # in float64, which an objective does not take
    dml = loss(output.embedding, values["labels"])
    adversarial = decorrelation(output, values["labels"], no_loss)
    alike = similarity(output, values["labels"], no_loss)
    torch.testing.assert_close(meta["rho"] * adversarial, values["value_separation"], **EXACT)
    torch.testing.assert_close(alike, values["value_selfsimilarity"], **EXACT)
    torch.testing.assert_close(similarity.queue, values["queue_after"], **EXACT)
    whole = dml + decorrelation.weight * adversarial + similarity.weight * alike
    torch.testing.assert_close(whole, values["loss"], **EXACT)
    whole.backward()
    torch.testing.assert_close(output.embedding.grad, values["grad"], **EXACT)
    for part, margin in loss.margins.items():
        wanted = {"discriminative": 1.0}.get(part, meta["alpha"]) * margin(
            unit_parts(output.embedding)[part], values["labels"], values[f"triplets_{part}"].unbind(1)
        )
        torch.testing.assert_close(wanted, {"discriminative": 1.0}.get(part, meta["alpha"]) * values[f"value_{part}"])
        torch.testing.assert_close(margin.beta.grad, values[f"grad_beta_{PUBLIC[part]}"], **EXACT)
    for part, regressor in decorrelation.regressors.items():
        for name, parameter in regressor.named_parameters():
            torch.testing.assert_close(parameter.grad, values[f"grad_{PUBLIC[part]}.{name}"], **EXACT)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("shares", "name"), [("of_batch", "selfsimilarity"), ("of_queue", "fixed")])
def test_both_shares_of_the_queue_equal_public_codes(golden_tensors, golden_meta, case, shares: str, name: str) -> None:
    values, meta = golden_tensors("diva", f"{case}_"), golden_meta("diva")[case]
    output = output_of(values)
    value = similarity_of(values, meta, shares=shares)(output, values["labels"], no_loss)
    expected = values["fixed" if name == "fixed" else "value_selfsimilarity"]
    torch.testing.assert_close(value, expected, **EXACT)
    torch.testing.assert_close(torch.autograd.grad(value, output.embedding)[0], values[f"grad_{name}"], **EXACT)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["labels", "across_classes"])
def test_negatives_are_drawn_as_often_as_public_code_draws_them(golden_tensors, case: str, kind: str) -> None:
    values = golden_tensors("diva", f"{case}_")
    rows, labels = unit_parts(values["embeddings"])["discriminative"], values["labels"]
    torch.manual_seed(1)
    counts = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    for _ in range(600):
        anchor, positive, negative = drawn_triplets(kind, rows, labels)
        counts[anchor, negative] += 1
        assert (labels[anchor] != labels[negative]).all()
        if kind == "labels":
            assert (labels[anchor] == labels[positive]).all()
            assert (anchor != positive).all()
        else:
            assert (labels[positive] != labels[anchor]).all()
            assert (labels[positive] != labels[negative]).all()
    has_positive = (labels[:, None] == labels).sum(1) > 1
    assert torch.equal(anchor, torch.arange(len(rows)) if kind == "across_classes" else has_positive.nonzero()[:, 0])
    torch.testing.assert_close(counts[anchor] / 600, values["negatives"][anchor], atol=0.08, rtol=0)


def test_permuted_labels_give_triplets_of_any_classes_by_distance() -> None:
    torch.manual_seed(0)
    rows, labels = normalize(torch.randn(8, 4)), torch.arange(4).repeat_interleave(2)
    pairs = torch.zeros(8, 8)
    for _ in range(2000):
        anchor, positive, negative = drawn_triplets("permuted", rows, labels)
        assert torch.equal(anchor, torch.arange(8))
        assert (positive != negative).all()
        assert (anchor != negative).all()
        pairs[anchor, positive] += 1 / 2000
    # Of 8 images with permuted labels each other one is as likely the second of its pair.
    torch.testing.assert_close(pairs, (1 - torch.eye(8)) / 7, atol=0.04, rtol=0)


def test_triplets_within_a_class_are_drawn_evenly_with_repetition() -> None:
    torch.manual_seed(0)
    labels = torch.tensor([5, 5, 5, 9, 9])
    rows = normalize(torch.randn(5, 4))
    counts = torch.zeros(3, 5)
    for _ in range(2000):
        triplets = torch.stack(drawn_triplets("within_class", rows, labels))
        assert triplets.shape == (3, 5)
        assert (labels[triplets] == labels[triplets[0]]).all()
        counts += torch.stack([x.bincount(minlength=5) for x in triplets])
    expected = torch.tensor([1 / 6, 1 / 6, 1 / 6, 1 / 4, 1 / 4]).expand(3, 5)  # classes are drawn evenly, not images
    torch.testing.assert_close(counts / 10_000, expected, atol=0.015, rtol=0)


def test_the_queue_grows_with_the_keys_until_it_is_full_and_keeps_the_latest() -> None:
    torch.manual_seed(0)
    module = SelfSimilarity(1.0, 8, queue_size=5)
    labels, rows = torch.arange(3), torch.randn(3, 8, 8)
    values = []
    for step in range(3):
        values.append(module(ModelOutput(rows[0, :3], {"keys": rows[step, :3]}), labels, no_loss))
        assert int(module.filled) == module.count_of("filled") == min(3 * (step + 1), 5)
    assert float(values[0]) == 0  # there is nothing to be told from
    assert float(values[1]) > 0
    latest = torch.cat([unit_parts(rows[step, :3])["self_similarity"] for step in range(3)])[-5:]
    torch.testing.assert_close(module.queue, latest)
    module.eval()
    before = module.queue.clone()
    module(ModelOutput(rows[0, :3], {"keys": rows[1, :3]}), labels, no_loss)
    assert torch.equal(module.queue, before)
    again = SelfSimilarity(1.0, 8, queue_size=5)
    again.load_state_dict(module.state_dict())
    assert again.count_of("filled") == 5


@pytest.mark.parametrize("shares", ["of_batch", "of_queue"])
def test_self_similarity_equals_a_naive_loop(shares: str) -> None:
    torch.manual_seed(1)
    module = SelfSimilarity(1.0, 20, queue_size=7, temperature=0.3, nearest=1.1, farthest=1.5, shares=shares).double()
    module.queue = normalize(torch.randn(7, 5, dtype=torch.float64))
    module.set_count("filled", 7)
    rows, keys = torch.randn(2, 4, 20, dtype=torch.float64)
    part = slice(5 * PARTS.index("self_similarity"), 5 * PARTS.index("self_similarity") + 5)
    queries, positives, v = normalize(rows[:, part]), normalize(keys[:, part]), torch.zeros(4, 7, dtype=torch.float64)
    for i, query in enumerate(queries):
        for j, key in enumerate(module.queue):
            d = (query - key).norm()
            if d <= 1.5:  # 1 / q(d) on the sphere of 5 dimensions
                v[i, j] = 1 / (d.clamp(min=1.1) ** 3 * (1 - d.clamp(min=1.1) ** 2 / 4))
    assert (v == 0).any() and v.sum(0).all() and (torch.cdist(queries, module.queue) < 1.1).any()
    w = v / v.sum(0 if shares == "of_batch" else 1, keepdim=True)
    values = []
    for i in range(4):
        own = queries[i] @ positives[i] / 0.3
        others = [w[i, j] * (queries[i] @ module.queue[j]) / 0.3 for j in range(7)]
        values.append(torch.stack([own, *others]).exp().sum().log() - own)
    value = module(ModelOutput(rows, {"keys": keys}), torch.arange(4), no_loss)
    torch.testing.assert_close(value, torch.stack(values).mean())


def test_opposite_and_equal_vectors_have_finite_weights() -> None:
    assert log_inverse_density(torch.tensor([0.5, 2.0]), 128).isfinite().all()
    module = SelfSimilarity(1.0, 8, queue_size=4)
    module.queue = torch.tensor([[1.0, 0], [-1, 0], [0, 1], [0, -1]])
    module.set_count("filled", 4)
    rows = torch.tensor([[1.0, 0], [0, 1]]).repeat(1, 4).requires_grad_()
    value = module(ModelOutput(rows, {"keys": -rows.detach()}), torch.arange(2), no_loss)
    assert torch.autograd.grad(value, rows)[0].isfinite().all()


@pytest.mark.parametrize("shares", ["of_batch", "of_queue"])
def test_one_near_key_leaves_the_shares_of_others_as_they_are_in_float32(shares: str) -> None:
    torch.manual_seed(0)
    part, batch = 128, 16
    queue = normalize(torch.randn(300, part))  # almost orthogonal: weights of exp(-90) beside that of the near key
    rows, keys = torch.randn(2, batch, 4 * part)
    rows[3] = queue[7].repeat(4)
    found = []
    for dtype in (torch.float32, torch.float64):
        module = SelfSimilarity(1.0, 4 * part, queue_size=300, shares=shares).to(dtype)
        module.queue = queue.to(dtype)
        module.set_count("filled", 300)
        output = ModelOutput(rows.to(dtype).requires_grad_(), {"keys": keys.to(dtype)})
        value = module(output, torch.arange(batch), no_loss)
        found.append((value, torch.autograd.grad(value, output.embedding)[0]))
    for ours, exact in zip(*found, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_gradients_of_the_decorrelation_are_reversed_for_embeddings_alone(golden_tensors, case: str) -> None:
    values = golden_tensors("diva", f"{case}_")
    torch.manual_seed(0)
    rows = values["embeddings"].requires_grad_()
    module = PartDecorrelation(1.0, rows.shape[1], hidden_size=3).double()
    parts = unit_parts(rows)
    plain = sum(
        -(parts["discriminative"] * normalize(module.regressors[name](parts[name]))).square().mean()
        for name in ("shared", "self_similarity", "intra")
    )
    value = module(ModelOutput(rows), values["labels"], no_loss)
    torch.testing.assert_close(value, plain)
    ours, naive = (torch.autograd.grad(x, [rows, *module.parameters()]) for x in (value, plain))
    torch.testing.assert_close(ours[0], -naive[0])
    for mine, wanted in zip(ours[1:], naive[1:], strict=True):
        torch.testing.assert_close(mine, wanted)


def test_the_loss_normalizes_each_part_by_itself() -> None:
    torch.manual_seed(0)
    rows, labels = torch.randn(8, 12), torch.arange(4).repeat_interleave(2)
    loss = Diva(4, 12)
    scaled = rows * torch.tensor([0.5, 3.0, 2.0, 1.5]).repeat_interleave(3)
    values = []
    for each in (rows, scaled):
        torch.manual_seed(3)
        values.append(loss(each, labels))
    torch.testing.assert_close(*values)
    # nothing is learned of the fourth part here
    gradient = torch.autograd.grad(loss(rows.requires_grad_(), labels), rows)[0].unflatten(1, (4, 3)).abs().sum((0, 2))
    assert gradient[PARTS.index("self_similarity")] == 0
    assert (gradient[[0, 1, 3]] > 0).all()
