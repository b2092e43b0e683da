"""A recipe in a run: what stands in its result and in its stored configuration."""

from omegaconf import OmegaConf

from dmlbench.config import compose, load_config
from dmlbench.results.store import CONFIG, read_result
from dmlbench.runner import run

SMALL = [
    *("dataset=glyphs", "dataset.table.num_classes=8", "dataset.table.images_per_class=5", "fit.max_steps=1"),
    *("dataset.table.image_size=24", "transform.train.padding=2", "fit.validate_every=1", "fit.keep=none"),
    *("head.out_features=8", "sampler.classes_per_batch=2", "sampler.images_per_class=2", "device=cpu"),
]


def test_a_result_names_its_recipe_and_what_was_given_instead(tmp_path) -> None:
    paths = [f"paths.output_dir={tmp_path / 'out'}", f"paths.cache_dir={tmp_path}", f"paths.data_dir={tmp_path}"]
    chosen = ["recipe=small", "loss=proxy_anchor", "pooling=gsp", "optim.lr_multipliers.loss=5"]
    plain = ["loss=proxy_anchor", "pooling=gsp", "optim.lr_multipliers.loss=5", "pooling.smoothing=0.5"]
    run_dir = run(compose("train", [*SMALL, *paths, *chosen]))
    recipe = {"name": "small", "side": "code", "overridden": {"optim.lr_multipliers.loss": 100.0}, "deviations": []}
    assert read_result(run_dir)["recipe"] == recipe
    places = OmegaConf.to_container(load_config(run_dir / CONFIG).runtime.recipe)["places"]
    assert places["pooling.smoothing"] == "GSP 1.6.7, losses with proxies"
    assert run(compose("train", [*SMALL, *paths, *plain])) == run_dir  # the same values are the same config
