"""Configs of the papers' tables have the values that papers and codes print, written down here once more by hand.

Nothing is read from the recipes. Where a paper and its code differ, values are the code's, which made the numbers.
"""

import re
from typing import Any

import pytest
from commands_of_tables import Command, commands
from composed import value
from omegaconf import OmegaConf

from dmlbench.checks import check
from dmlbench.config import compose

SMALL = ("cub200", "cars196")
Values = dict[str, Any]


# GSP: supplement, 1.6.7 (CUB, Cars196, In-shop, SOP); C2, MS and triplet by the code's defaults (losses/*.py).
DATASETS = ("cub200", "cars196", "inshop", "sop")
KERAS = 1  # validations that Keras counts more than PyTorch before a learning rate falls
GSP_LOSSES: dict[str, dict[str, tuple[Any, ...]]] = {
    "C1": {"loss.neg_margin": (0.5,) * 4},
    "C1+XBM": {
        "loss.loss.neg_margin": (0.5,) * 4,
        "loss.memory_size": (25 * 32, 25 * 32, 400 * 32, 1400 * 32),
        "loss.start_step": (1000,) * 4,
    },
    "C2": {"loss.pos_margin": (0.0,) * 4, "loss.neg_margin": (0.5,) * 4},
    "MS": {"loss.alpha": (2,) * 4, "loss.beta": (50,) * 4, "loss.base": (0.5,) * 4},
    "Triplet": {"loss.margin": (0.05,) * 4},
    "PNCA": {"loss.temperature": (0.11,) * 4, "rate of proxies": (1e-3,) * 4},
    "PAnchor": {"loss.margin": (0.1,) * 4, "loss.alpha": (32,) * 4, "rate of proxies": (1e-3,) * 4},
}
OTHER_LABELS = {
    "contrastive": "C2", "ProxyNCA++": "PNCA", "Contrastive [1]": "C2", "C+XML": "C2", "PA+XML": "PAnchor",
    "Triplet [2]": "Triplet",
    "MS [3]": "MS", "PNCA++ [8]": "PNCA", "PAnchor [7]": "PAnchor", "XBM+GSP": "C1+XBM",
}  # fmt: skip
POOLINGS = {
    "GAP": "Gap", "GMP": "Gmp", "GMP+GAP": "GapGmp", "GeMean": "Gem", "DeLF": "Delf", "CBAM": "Cbam", "CroW": "Crow",
    "GeMax": "Gemax",
    "GSoP": "Gsop", "SOLAR": "Solar", "T-SMK": "Tsmk", "WELDON": "Weldon",
}  # fmt: skip


def of_gsp_fair(command: Command) -> Values:
    """The fair setting (1.6.4, 1.6.5) and the search for parameters, with what 1.6.7 has for the loss and for GSP."""
    score, at = command.score, DATASETS.index((command.score.dataset or "cub200").replace("cifar100_collage", "cub200"))
    row = score.row.split(" [")[0]
    label = OTHER_LABELS.get(score.row, OTHER_LABELS.get(score.setting, score.setting))
    if not label:
        label = next((x for x in sorted(GSP_LOSSES, key=len, reverse=True) if row.startswith(f"{x}+")), "C2")
    row = row.removeprefix(f"{label}+")
    proxies, hpo, small = label in ("PNCA", "PAnchor"), score.protocol == "hpo" or "/figure" in command.table, at < 2
    wanted = {
        **{key: values[at] for key, values in GSP_LOSSES[label].items()},
        "optim.lr": 1e-5, "optim.weight_decay": 1e-4, "optim.optimizer._target_": "torch.optim.Adam", "schedule": None,
        "batch": (32, 1) if proxies else (8, 4), "fit.validate_every": 100 if small else 1000,
        "fit.monitor": "map_at_r",
        "fit.patience": ((10, 7) if hpo else (15, 10))[not small],
        "fit.warmup_steps": (100 if small else 1000) * proxies,
        "fit.max_steps": (100 if small else 1000) * (10_000 + proxies), "optim.optimizer.eps": 1e-7,
        "optim.decay_biases": True, "sampler._target_": "dmlbench.data.batches.samplers.EqualClassBatchSampler",
        "fit.clip_norm": 10.0, "transform.train.crop": 227, "transform.eval.resize": 256, "backbone.batch_norm": "all",
        "backbone._target_": "dmlbench.models.bninception.BNInception", "regularizers": [],
        "head.out_features": 8192 if "64x128" in row else 128,
    }  # fmt: skip
    if re.search("GSP|mu=|m=|second row|third row", row):
        wanted |= {
            "pooling": "Gsp", "regularizers": ["zsr"], "regularizer.zsr.weight": 0.1, "regularizer.zsr.ridge": 0.05,
            "regularizer.zsr.softmax_scale": 9.5,
            "pooling.num_prototypes": 64 if small else 128, "pooling.transport_ratio": 0.3,
            "pooling.smoothing": 0.5 if proxies else 5.0,
            "pooling.combine": {"GMP+GSP": "gmp", "GeMean+GSP": "gem"}.get(row),
        }  # fmt: skip
        names = {"m": "pooling.num_prototypes", "mu": "pooling.transport_ratio", "epsilon": "pooling.smoothing",
                 "lambda": "regularizer.zsr.weight"}  # fmt: skip
        wanted |= {names[name]: float(number) for name, number in re.findall(r"(\w+)=([\d.]+)", row)}
        if row == "second row":  # of table 1: the zero-shot loss alone, then GSP alone
            wanted["pooling.transport_ratio"] = 1.0
        elif row == "third row":
            wanted = {key: value for key, value in wanted.items() if not key.startswith("regularizer")}
            wanted["regularizers"] = []
    elif "XML" in row:
        wanted |= {
            "pooling": "GapHistogram", "pooling.smoothing": 10.0, "pooling.num_prototypes": 64 if small else 128,
            "regularizers": ["xml"], "regularizer.xml.weight": 0.01, "regularizer.xml.ridge": 0.05,
        }  # fmt: skip
    elif row.startswith("TFM"):
        wanted |= {"pooling": "Transformer", "pooling.num_layers": int(row.removeprefix("TFM-"))}
    elif row.startswith(("OTP", "VLAD")):
        count, size = map(int, re.findall(r"\d+", row))
        key = "pooling.num_prototypes" if "OTP" in row else "pooling.num_centers"
        wanted |= {"pooling": "Otp" if "OTP" in row else "NetVlad", key: count, "pooling.feature_size": size}
        del wanted["head.out_features"]  # the pooling projects
    else:
        wanted["pooling"] = POOLINGS[row if command.table != "xml/table1" and row != "Baseline" else "GAP"]
    return wanted


def of_gsp_collage(command: Command) -> Values:
    """Supplement 2.2; margins and temperature of 1.6.7 (CUB)."""
    of_cub = of_gsp_fair(command)
    kept = {key: of_cub[key] for key in of_cub if key.startswith(("loss.", "pooling", "head.", "regularizer"))}
    kept |= {"loss.neg_margin": 0.3841} if "loss.neg_margin" in kept else {}
    wanted = kept | {
        "optim.lr": 1e-3, "optim.optimizer._target_": "torch.optim.Adam", "batch": (16, 4), "fit.monitor": "map_at_r",
        "optim.weight_decay": 0.0, "transform.train.padding": 0, "transform.train.flip": 0.0,
        "schedule.factor": 0.5, "schedule.patience": 5 - KERAS,
        "backbone._target_": "dmlbench.models.resnet_cifar.ResNet20",
        "protocol._target_": "dmlbench.data.protocols.Conventional", "dataset.table.layout": "public",
        "dataset.table.images_per_class": None,
    }  # fmt: skip
    if command.score.row == "GSP":
        wanted |= {
            "pooling.num_prototypes": 128, "pooling.transport_ratio": 0.2, "pooling.smoothing": 10.0,
            "regularizer.zsr.weight": 0.5, "regularizer.zsr.halves": "alternate",
        }  # fmt: skip
    return wanted


def of_gsp_conventional(command: Command) -> Values:
    """Tables 3 and 4 (1.6.4; trainModel.py and the configurations of the code)."""
    score, at = command.score, DATASETS.index(command.score.dataset)
    of_resnet, small = score.backbone == "resnet50", at < 2
    images = 28 * 4 if of_resnet else 32 * 4
    wanted = {
        "optim.lr": 1e-5 if small else 1e-4, "optim.weight_decay": 4e-4 if of_resnet else 1e-4,
        "head.out_features": 512,
        "batch": (images // 4, 4), "fit.monitor": "recall_at_1", "fit.validate_every": 25 if small else 250,
        "fit.patience": 15 if small else 10, "fit.max_steps": 250_000 if small else 2_500_000,
        "schedule.factor": 0.5, "schedule.patience": (4 if small else 3) - KERAS,
        "schedule.min_lr": 1e-6, "loss.loss.neg_margin": 0.5, "protocol.num_repeats": 3, "transform.train.crop": 227,
        "loss.memory_size": images * {"inshop": 400, "sop": 1400}.get(score.dataset, 25 if of_resnet else 50),
        "loss.start_step": 100 if of_resnet and small else 1000, "pooling": "GapGmp", "regularizers": [],
    }  # fmt: skip
    if "GSP" in score.row:
        wanted |= {
            "pooling": "Gsp", "pooling.combine": "gem" if of_resnet and small else "gmp", "regularizers": ["zsr"],
            "pooling.num_prototypes": 64 if small else 128, "pooling.smoothing": 5.0, "regularizer.zsr.weight": 0.1,
        }  # fmt: skip
    return wanted


# ProxyNCA++: table 1 of CUB, Cars196, In-shop, SOP; what a row has is in its label.
ALL_SIX = {"scale", "max", "norm", "cbs", "fast", "prob"}
SETTINGS = {"with prob": "prob", "with scale": "scale", "GMP": "max"}


def of_proxynca_pp(command: Command) -> Values:
    """Section 4.1, table 1, and config/*.json of the code."""
    score, at = command.score, DATASETS.index(command.score.dataset)
    row, large = score.row, at > 1
    named = set(re.findall(r"(?<=[+-])(?:scale|max|norm|cbs|fast|prob)\b", row)) | {SETTINGS.get(score.setting, "")} - {
        ""
    }
    of_norm_softmax = row.startswith(("NormSoftMax", "T=0", "T=1.", "T=2", "class vectors"))
    has = named
    if command.table.endswith(("figure4a", "figure4b", "figure4c")) or row.startswith(("ProxyNCA++", "Ours", "-")):
        has = ALL_SIX - named
    elif of_norm_softmax and "/table" in command.table:
        has = named | {"norm", "cbs"}
    rate = 2.4e-2 if large else 4e-3
    wanted = {
        "optim.lr": rate, "optim.weight_decay": 0.0, "optim.optimizer.eps": 1.0, "backbone.name": "resnet50.tv_in1k",
        "backbone.batch_norm": "none", "head.out_features": score.embedding_size or 2048, "head.bias": True,
        "head.layer_norm": "norm" in has, "pooling": "Gmp" if "max" in has else "Gap", "protocol.num_repeats": 5,
        "fit.max_steps": 850 if large else 450, "fit.warmup_steps": 50, "fit.clip_value": 10.0,
        "transform.train.crop": 227 if command.table.endswith("15") else 256,
        "rate of proxies": ((4e2, 4e2, 2.4e3, 2.4e2)[at] if "fast" in has else rate),
        "evaluation.recall_at": ([1, 2, 4, 8], [1, 2, 4, 8], [1, 10, 20, 30, 40], [1, 10, 100, 1000])[at],
    }  # fmt: skip
    images = 192 if large else 32
    classes = images // 3 if large else images // 4
    wanted["batch"] = (classes, images // classes) if "cbs" in has else (classes, images)
    if of_norm_softmax:
        wanted |= {"loss.temperature": 0.5, "rate of proxies": 0.4 if "fast" in has else rate}
    else:
        wanted |= {"loss.softmax_scale": 9.0 if "scale" in has else 1.0, "loss.assignment_probability": "prob" in has}
    if command.table.endswith("appendix_d"):
        del wanted["backbone.name"]
        wanted |= {"head.out_features": 64, "transform.train.crop": 227, "loss.softmax_scale": 3.0}
    if score.dataset == "inshop":
        wanted |= {"schedule": None, "fit.validate_every": 850}
    else:
        wanted |= {
            "schedule.patience": 4, "schedule.factor": 0.1, "protocol.stage": 2,
            "schedule.threshold": 1e-4, "schedule.threshold_mode": "rel",
        }  # fmt: skip
    if match := re.match(r"(T|k)=(?:1/)?([\d.]+)", row):
        key = "loss.temperature" if of_norm_softmax else "loss.softmax_scale"
        wanted |= {"T": {key: float(match[2])}, "k": {"pooling.k": int(float(match[2])), "pooling": "KMax"}}[match[1]]
    if match := re.search(r" at ([\de-]+)$", row):
        wanted["rate of proxies"] = float(match[1])
    return wanted


# AVSL: samples_avsl.sh and samples_baseline.sh; rates of trunk, embedder and collector.
TRUNK = {"cub200": 1e-5, "cars196": 0.00025230934618157737, "sop": 6e-4}
EMBEDDER = {"cub200": 5.5e-4, "cars196": 0.00016294139202611374, "sop": 6e-4}
COLLECTOR = {"cub200": 1.1e-4, "cars196": 0.09918213648327627, "sop": 0.06}
INFERENCE = {"+ M": "top", "+ M & R": "reliable", "+ M (concat)": "concat"}


def of_avsl(command: Command) -> Values:
    """Sections 4.2 and 4.3, tables 2 to 4, and the scripts of the code."""
    score, dataset = command.score, command.score.dataset or "cars196"
    row = score.row.removeprefix("ProxyAnchor ") if "table2" in command.table else score.row
    wanted: Values = {
        "optim.optimizer._target_": "torch.optim.AdamW", "optim.weight_decay": 1e-4, "transform.train.crop": 224,
        "fit.monitor": "recall_at_1", "fit.warmup_steps": 50, "protocol.num_repeats": 3, "fit.max_steps": 610,
        "fit.patience": 3 if dataset == "sop" else 15, "fit.validate_every": 50 if dataset == "sop" else 10,
        "backbone.name": "resnet50.tv_in1k", "backbone.batch_norm": "none" if dataset == "sop" else "all",
        "evaluation.recall_at": [1, 10, 100] if dataset == "sop" else [1, 2, 4, 8],
    }  # fmt: skip
    of_margin_loss: Values = {
        "batch": (45, 4), "optim.lr": 1e-5, "rate of proxies": 1e-2, "schedule.step_size": 100,
        "backbone.batch_norm": "all", "fit.warmup_steps": 0,
        "optim.lr_multipliers.head": 10.0, "optim.lr_multipliers.distance": 10.0,
    }  # fmt: skip
    if row == "Margin [41]":
        return wanted | of_margin_loss | {
            "loss.beta": 1.2, "loss.margin": 0.2, "miner.cutoff": 0.5, "head.out_features": 512, "pooling": "GapGmp",
        }  # fmt: skip
    if row in ("ProxyAnchor", "ProxyAnchor [13]", "PA"):
        return wanted | {
            "optim.lr": 6e-4 if dataset == "sop" else 1e-4, "head.out_features": 512, "pooling": "GapGmp",
            "loss.alpha": 32,
            "loss.margin": 0.1, "sampler.batch_size": 180, "rate of proxies": 6e-2 if dataset == "sop" else 1e-2,
            **({"schedule.step_size": 100} if dataset == "cars196" else {}),
        }  # fmt: skip
    wanted |= {"head.level_size": 512, "head.top_k": 128, "head.momentum": 0.5, "head.inference": "rectified",
               "head.reliability": "learned" if "LR" in row else "std", "pooling": None}  # fmt: skip
    if "Margin" in row:
        levels = {"loss.loss.beta": 1.2, "loss.loss.margin": 0.2, "loss.miner.cutoff": 0.5}
        return wanted | of_margin_loss | levels
    wanted |= {
        "loss.alpha": 16, "loss.pos_margin": 1.8, "loss.neg_margin": 2.4 if dataset == "sop" else 2.2,
        "loss.final_pos_margin": 1.8, "loss.final_neg_margin": 2.2, "fit.warmup_frozen": ["backbone"],
        "optim.lr": TRUNK[dataset],
        "loss.level_weights": [0.5, 1.0, 0.5] if dataset == "cub200" else [1.0, 4.0, 4.0], "sampler.batch_size": 180,
        "rate of proxies": COLLECTOR[dataset], "optim.lr_multipliers.head": EMBEDDER[dataset] / TRUNK[dataset],
        "optim.lr_multipliers.distance": COLLECTOR[dataset] / TRUNK[dataset],
        "schedule.step_size": {"cub200": 100, "cars196": 50, "sop": 150}[dataset],
        "schedule.gamma": 0.25 if dataset == "sop" else 0.5, "head.inference": INFERENCE.get(row, "rectified"),
    }  # fmt: skip
    if score.embedding_size == 128:
        wanted["head.level_size"] = 128
    if "MUS" in row:
        wanted["head.momentum"] = 0.0
    names = {"gamma": "head.momentum", "k": "head.top_k"}
    return wanted | {names[name]: float(number) for name, number in re.findall(r"(gamma|k)=([\d.]+)", row)}


LIBC: dict[str, tuple[Any, ...]] = {  # config_{cub,cars,inshop,sop}_train.yaml of dvl-tum/intra_batch a1ae3de8
    "optim.lr": (0.0001563663718906821, 0.00036683239911604993, 0.00011265974954242144, 0.0002472471515853406),
    "optim.weight_decay": (6.059722614369727e-6, 2.551918610962277e-9, 1.0554824926510768e-7, 2.7650277063275255e-13),
    "loss.temperature": (0.2, 0.1111111111111, 0.18591347176280537, 0.6046908988578005),
    "loss.num_layers": (1, 2, 1, 1),
    "loss.num_heads": (2, 8, 4, 8),
    "loss.concatenate_layers": (False, True, False, False),
    "loss.refined_weight": (1.0, 1.0, 1.0, 0.0),
    "loss.label_smoothing": (0.1,) * 4,
    "batch": ((6, 9), (10, 7), (14, 4), (15, 6)),
    "head.out_features": (512,) * 4,
    "head.bias": (True,) * 4,
    "optim.optimizer._target_": ("torch.optim.RAdam",) * 4,
    "optim.optimizer.decoupled_weight_decay": (True,) * 4,
    "fit.max_steps": (700,) * 4,
    "fit.validate_every": (10,) * 4,
    "fit.patience": (None,) * 4,
    "fit.clip_norm": (None,) * 4,
    "fit.clip_value": (None,) * 4,
    "fit.monitor": ("recall_at_1",) * 4,
    "schedule.milestones": ([300],) * 4,
    "schedule.gamma": (0.1,) * 4,
    "transform.train.resize": (None,) * 4,
    "transform.train.scale": ([0.08, 1.0],) * 4,
    "transform.train.crop": (227,) * 4,
    "transform.eval.resize": (256,) * 4,
    "backbone.batch_norm": ("none",) * 4,
    "protocol.num_repeats": (3,) * 4,
}


def of_libc(command: Command) -> Values:
    """LIBC by its own configurations; with GSP as in its port to embed_layer.py, with XML as in its section 3.1."""
    at = DATASETS.index(command.score.dataset)
    wanted = {key: values[at] for key, values in LIBC.items()} | {"pooling.num_prototypes": 64 if at < 2 else 128}
    if command.score.row == "LIBC+XML":
        return wanted | {
            "pooling": "GapHistogram", "pooling.smoothing": 10.0,
            "regularizers": ["xml"], "regularizer.xml.weight": 0.01, "regularizer.xml.ridge": 0.05,
        }  # fmt: skip
    return wanted | {
        "pooling": "Gsp", "pooling.combine": "weighted_gmp", "pooling.smoothing": 0.1, "pooling.transport_ratio": 0.3,
        "loss.init": "he_normal", "regularizer.zsr.softmax_scale": 9.5, "regularizers": ["zsr"],
        "regularizer.zsr.weight": 0.1, "regularizer.zsr.ridge": 0.05,
    }  # fmt: skip


def of_hyp_vit(command: Command) -> Values:
    """README and train.py of htdt/hyp_metric c89de049; frozen encoders: eval_pretrain.py."""
    score, at = command.score, DATASETS.index(command.score.dataset)
    wanted: Values = {
        "pooling": "Native",
        "evaluation.recall_at": ([1, 2, 4, 8], [1, 2, 4, 8], [1, 10, 20, 30], [1, 10, 100, 1000])[at],
        "transform.eval.crop": 224, "transform.eval.resize": 256 if at == 0 else 224, "protocol.num_repeats": 3,
        "backbone.name": {
            "vit_small": "vit_small_patch16_224.augreg_in21k_ft_in1k", "dino_vit_small": "vit_small_patch16_224.dino",
            "deit_small": "deit_small_distilled_patch16_224.fb_in1k",
        }[score.backbone],
    }  # fmt: skip
    if "frozen" in score.row:
        return wanted | {"fit.max_steps": 0, "fit.precision": "float32", "head.init": "identity"}
    wanted |= {
        "optim.lr": 1e-5 if score.backbone == "dino_vit_small" else 3e-5, "optim.weight_decay": 1e-2,
        "optim.optimizer._target_": "torch.optim.AdamW", "optim.optimizer.eps": 1e-8,
        "batch": ((100, 9), (98, 9), (450, 2), (450, 2))[at], "fit.max_steps": (50, 300, 3200, 5000)[at],
        "fit.validate_every": (50, 300, 3200, 5000)[at], "fit.warmup_steps": 0, "fit.patience": None,
        "fit.clip_norm": 3.0, "schedule": None, "regularizers": [], "head.out_features": score.embedding_size,
        "head.layer_norm": False, "head.init": "orthogonal", "backbone.frozen_until": "patch_projection",
        "transform.train.scale": [0.2, 1.0], "transform.train.crop": 224, "transform.train.resize": None,
    }  # fmt: skip
    if score.row.startswith("Sph"):  # --hyp_c 0 --t 0.1
        return wanted | {"loss.temperature": 0.1, "head.bias": True}
    return wanted | {
        "loss.temperature": 0.2, "head.curvature": 0.1, "head.clip_radius": 2.3, "head.riemannian_gradient": False,
    }  # fmt: skip


FROZEN = {"fit.max_steps": 0, "fit.precision": "float32", "head.init": "identity", "transform.eval.crop": 224}


def of_hist(command: Command) -> Values:
    """README and train.py of ljin0429/HIST e7d650c8; CUB, Cars196, SOP; its epochs come after one of warm-up."""
    if "frozen" in command.score.row:
        return {**FROZEN, "pooling": "GapGmp"}
    at = ("cub200", "cars196", "sop").index(command.score.dataset)
    rate = (1.2e-4, 1e-4, 1e-4)[at]
    return {
        "optim.lr": rate, "rate of proxies": (1e-1, 1e-1, 1e-2)[at], "optim.weight_decay": (5e-5, 1e-4, 1e-4)[at],
        "optim.lr_multipliers.network": (5, 10, 10)[at], "optim.optimizer._target_": "torch.optim.Adam",
        "loss.scale": (32, 32, 16)[at], "loss.alpha": (1.1, 0.9, 2)[at], "loss.hidden_size": 512,
        "loss.tuplet_weight": 1, "sampler.batch_size": 32, "head.out_features": 512, "pooling": "GapGmp",
        "fit.max_steps": (410, 510, 610)[at], "fit.warmup_steps": 10, "fit.warmup_schedule": "rests",
        "fit.validate_every": 10, "fit.patience": None, "fit.monitor": "recall_at_1",
        "schedule.step_size": (50, 100, 100)[at], "schedule.gamma": 0.5, "backbone.name": "resnet50.tv_in1k",
        "backbone.batch_norm": ("stats", "stats", "none")[at],
        "fit.warmup_batch_norm": ("frozen", "frozen", "updated")[at],
        "transform.train.scale": [0.08, 1.0], "transform.train.crop": 224, "transform.eval.resize": 256,
    }  # fmt: skip


def of_recall_at_k(command: Command) -> Values:
    """main.py and netlib.py of yash0307/RecallatK_surrogate ed052029; Cars196, SOP."""
    if "frozen" in command.score.row:
        return {**FROZEN, "pooling": "Gem"}
    at = ("cars196", "sop").index(command.score.dataset)
    return {
        "optim.lr": (1e-4, 2e-4)[at], "optim.weight_decay": 4e-4, "optim.optimizer._target_": "torch.optim.Adam",
        "batch": ((98, 4), (1000, 4))[at], "fit.forward_batch": (98, 200)[at], "fit.max_steps": (1700, 550)[at],
        "fit.validate_every": 50, "fit.patience": None, "fit.warmup_steps": 0, "fit.monitor": "recall_at_1",
        "schedule.milestones": ([800, 1400], [250, 500])[at], "schedule.gamma": 0.3, "loss.simix": False,
        "loss.k": [1, 2, 4, 8, 16], "loss.k_temperatures": [1, 1, 1, 1, 1], "loss.rank_temperature": 0.01,
        "backbone.name": "resnet50.tv_in1k", "backbone.batch_norm": "stats", "pooling": "Gem", "pooling.power": 3.0,
        "pooling.learn_power": True, "head.out_features": 512, "head.layer_norm": True,
        "transform.train.scale": [0.08, 1.0], "transform.train.crop": 224, "transform.eval.resize": 256,
    }  # fmt: skip


def of_hier(command: Command) -> Values:
    """scripts/*/*.sh and train.py of tjddus9597/HIER-CVPR23 3986a744."""
    score, at = command.score, DATASETS.index(command.score.dataset)
    cnn, large = score.backbone == "resnet50", at > 1
    if "frozen" in score.row:
        return {**FROZEN, "pooling": "GapGmp" if cnn else "Native"}
    rate = {"dino_vit_small": 5e-6, "resnet50": 6e-4 if large else 1e-4}.get(score.backbone, 1e-5)
    wanted: Values = {
        "optim.lr": rate, "rate of proxies": 1e4 * rate, "optim.lr_multipliers.regularizer": 50,
        "optim.lr_multipliers.head": 100 if large and not cnn else 1, "optim.weight_decay": 1e-4 if large else 1e-2,
        "optim.optimizer._target_": "torch.optim.AdamW", "optim.optimizer.eps": 1e-4, "batch": (90, 2),
        "loss.margin": 0.1, "loss.alpha": 32, "regularizers": ["hier"], "regularizer.mixing": "add",
        "regularizer.hier.weight": 0.5, "regularizer.hier.num_proxies": 512, "regularizer.hier.num_neighbors": 20,
        "regularizer.hier.margin": 0.1, "head.curvature": 0.1, "head.clip_radius": 2.3, "head.layer_norm": True,
        "head.riemannian_gradient": True, "head.out_features": score.embedding_size,
        "fit.max_steps": 1500 if large else 1000, "fit.warmup_steps": 50 if large else 10,
        "fit.validate_every": 50 if score.dataset == "sop" else 10, "fit.patience": None, "fit.clip_value": 10.0,
        "fit.clip_norm": None, "fit.warmup_frozen": ["backbone"], "pooling": "GapGmp" if cnn else "Native",
        "transform.train.scale": [0.08 if cnn else 0.2, 1.0], "transform.train.crop": 224,
        "transform.eval.resize": 256,
    }  # fmt: skip
    if cnn:
        steps, factor = ((50, 0.5), (100, 0.5), (200, 0.3), (250, 0.3))[at]
        return wanted | {"backbone.batch_norm": "stats", "schedule.step_size": steps, "schedule.gamma": factor}
    wanted |= {"backbone.frozen_until": "patch_projection", "schedule": None}
    if score.backbone == "vit_small":
        wanted["backbone.name"] = "vit_small_patch16_224.augreg_in21k_ft_in1k"
    return wanted


OF_PAPER = {
    "proxynca_pp": of_proxynca_pp, "avsl": of_avsl, "hyp_vit": of_hyp_vit, "hist": of_hist,
    "recall_at_k": of_recall_at_k, "hier": of_hier,
}  # fmt: skip


def expected(command: Command) -> Values:
    paper = command.table.split("/")[0]
    if command.score.row.startswith("LIBC"):
        return of_libc(command)
    if paper in ("gsp", "xml"):
        if command.score.dataset == "cifar100_collage":
            return of_gsp_collage(command)
        of_test_half = command.table in ("gsp/table3", "gsp/table4")
        return of_gsp_conventional(command) if of_test_half else of_gsp_fair(command)
    return OF_PAPER[paper](command)


def differences(command: Command) -> list[str]:
    cfg = compose("train", [f"experiment={command.table}", *command.overrides])
    check(cfg)
    OmegaConf.update(cfg, "runtime.steps_per_epoch", 10)
    found = {key: value(cfg, key) for key in expected(command)}
    return [
        f"{command}: {key} is {found[key]}, not {wanted}" for key, wanted in expected(command).items()
        if not (found[key] == wanted or (isinstance(wanted, float) and found[key] == pytest.approx(wanted, rel=1e-12)))
    ]  # fmt: skip


SOME = {  # table, row, data set, setting: each paper, data set, loss and kind of pooling once
    ("gsp/table2", "MS+GSP", "cub200", ""), ("gsp/table2", "C1+XBM+GSP", "sop", ""),
    ("gsp/table2", "Triplet+GAP", "cars196", ""),
    ("gsp/table2", "PAnchor+GSP", "inshop", ""), ("gsp/table3", "C1+XBM+GSP", "cars196", ""),
    ("gsp/table6", "VLAD-(64x128) [39]", "cub200", "ProxyNCA++"),
    ("gsp/table6", "GSP", "cifar100_collage", "contrastive"),
    ("gsp/table7", "m=128, mu=0.7, epsilon=20, lambda=0.5", "cub200", "C2"),
    ("xml/table1", "C+XML", "inshop", ""), ("xml/table1", "LIBC+XML", "cars196", ""),
    ("gsp/table4", "LIBC+GSP", "sop", ""), ("proxynca_pp/table5", "ProxyNCA", "sop", ""),
    ("proxynca_pp/table8", "+scale +norm +cbs", "cub200", "with prob"),
    ("proxynca_pp/table13", "NormSoftMax (+fast)", "cars196", ""),
    ("proxynca_pp/table15", "Ours", "inshop", ""), ("avsl/table1", "ProxyAnchor-AVSL", "sop", ""),
    ("avsl/table1", "Margin-AVSL", "cub200", ""), ("avsl/table1", "Margin [41]", "sop", ""),
    ("hyp_vit/table1", "Hyp-ViT", "cars196", ""), ("hyp_vit/table2", "DINO (frozen)", "cub200", ""),
    ("hist/table1", "HIST", "cub200", ""), ("recall_at_k/table1", "RS@k", "sop", ""),
    ("hier/table1", "HIER", "sop", ""),
}  # fmt: skip


def labels(command: Command) -> tuple[str, str, str, str]:
    return command.table, command.score.row, command.score.dataset, command.score.setting


@pytest.mark.fast_sample(5)
@pytest.mark.parametrize("some", sorted(SOME), ids=lambda some: " ".join(filter(None, some)))
def test_configs_of_tables_have_the_printed_values(some: tuple[str, str, str, str]) -> None:
    command = next(each for each in commands() if labels(each) == some)
    assert differences(command) == []


@pytest.mark.slow
@pytest.mark.parametrize("table", sorted({command.table for command in commands()}))
def test_every_config_of_every_table_has_the_printed_values(table: str) -> None:
    assert [line for command in commands() if command.table == table for line in differences(command)] == []
