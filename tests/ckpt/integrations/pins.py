"""The names of frameworks that integrations use although they are not public: `python -m ...pins FRAMEWORK`."""

from __future__ import annotations

import sys
import tempfile
import warnings


def lightning() -> None:
    """Of Lightning's Trainer and ModelCheckpoint."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.trainer.connectors import callback_connector

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(accelerator="cpu", logger=False, default_root_dir=folder, enable_progress_bar=False)
    assert callable(trainer._checkpoint_connector.dump_checkpoint)
    assert trainer._checkpoint_connector._get_loops_state_dict().keys() == {
        "fit_loop", "validate_loop", "test_loop", "predict_loop"
    }  # fmt: skip
    assert callable(ModelCheckpoint._find_last_checkpoints)
    assert trainer.fit_loop._data_fetcher is None
    assert callable(trainer.fit_loop.epoch_loop._should_accumulate)
    assert trainer.fit_loop.state_dict()["state_dict"] == {}  # holds `combined_loader` with the positions of loaders
    assert callback_connector._CallbackConnector._reorder_callbacks([first := ModelCheckpoint()]) == [first]


def transformers() -> None:
    """Methods of the Trainer that are replaced: with these arguments, called in this order by `train`."""
    from inspect import getsource, signature

    from transformers import Trainer

    for name, arguments in (
        ("_save_checkpoint", ["model", "trial"]),
        ("_load_from_checkpoint", ["resume_from_checkpoint", "model"]),
        ("_load_optimizer_and_scheduler", ["checkpoint"]),
        ("_load_scaler", ["checkpoint"]),
        ("_load_rng_state", ["checkpoint"]),
        ("_load_best_model", []),
    ):
        assert list(signature(getattr(Trainer, name)).parameters)[1:] == arguments, name
    source = getsource(Trainer._inner_training_loop)  # the first drops the name of the best checkpoint
    assert source.index("self._init_training_state(") < source.index("self._prepare_for_training(")
    source = getsource(Trainer._prepare_for_training)
    assert source.index("self._load_optimizer_and_scheduler(") < source.index("self._load_scaler(")


def accelerate() -> None:
    """Attributes of an Accelerator, and of the loaders that it prepares."""
    import torch
    from accelerate import Accelerator
    from accelerate.data_loader import DataLoaderShard
    from torch.utils.data import DataLoader, TensorDataset

    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.zeros(3))))
    assert accelerator._dataloaders == [loader]
    for name in ("_models", "_optimizers", "_schedulers", "_custom_objects"):
        assert getattr(accelerator, name) == [], name
    assert accelerator.step == 0
    assert accelerator.scaler is None
    assert type(loader) is DataLoaderShard
    assert type(loader.base_dataloader) is DataLoader
    assert loader.iteration == 0
    assert "dl_state_dict" in DataLoaderShard._update_state_dict.__code__.co_names


def torchtitan() -> None:
    """The hooks that a manager implements, and that the Trainer calls their public counterparts in this order."""
    from importlib.metadata import version
    from importlib.util import find_spec
    from inspect import signature
    from pathlib import Path

    from torchtitan.components.checkpointer import BaseCheckpointManager

    assert version("torchtitan").startswith("0.3.")
    hooks = {
        "_load": ["self", "step"], "_save": ["self", "curr_step", "last_step"], "_maybe_wait_for_staging": ["self"],
        "_wait_for_saving": ["self"], "_close": ["self"],
    }  # fmt: skip
    assert BaseCheckpointManager.__abstractmethods__ == set(hooks)
    for name, arguments in hooks.items():
        assert list(signature(getattr(BaseCheckpointManager, name)).parameters) == arguments, name
    assert {"enable", "save_future"} <= BaseCheckpointManager.__annotations__.keys()
    spec = find_spec("torchtitan")
    assert spec is not None
    assert spec.origin is not None
    source = (Path(spec.origin).parent / "trainer.py").read_text()  # not imported: it needs packages for reports
    build = source[source.index("self.checkpointer = config.checkpoint.build(") :]
    for name in ("dataloader", "model_parts", "optimizers", "lr_schedulers", "states", "sd_adapter", "base_folder"):
        assert f"{name}=" in build[:900], name
    step = source[source.index("self.checkpointer.maybe_wait_for_staging()") :]
    assert step.index("self.optimizers.step()") < step.index("self.checkpointer.save(")
    train = source[source.index("def train(self)") :]
    assert train.index("self.checkpointer.load(") < train.index("self.batch_generator(self.dataloader)")


def keras() -> None:
    """What `fit` does around a callback, on the back end of KERAS_BACKEND; and where the global random state is."""
    from inspect import getsource, signature

    import keras
    from keras.src.backend.common.global_state import get_global_attribute
    from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR, global_seed_generator

    assert global_seed_generator() is get_global_attribute(GLOBAL_SEED_GENERATOR)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    assert model._initial_epoch is None
    assert list(signature(model._symbolic_build).parameters) == ["iterator", "data_batch"]
    assert model.built
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        dataset = tf.data.Dataset.range(3)
        assert iter(dataset)._dataset is dataset
        shuffled = dataset.shuffle(3)
        assert (shuffled._inputs(), int(shuffled._seed), int(shuffled._seed2)) == ([dataset], 0, 0)
        assert int(dataset.shuffle(3, seed=0)._seed)
    source = getsource(keras.Model.fit)
    order = (
        "self.make_train_function()", "callbacks.on_train_begin()", "self._initial_epoch or initial_epoch",
        "self.reset_metrics()", "callbacks.on_epoch_begin(", "in epoch_iterator:", "callbacks.on_train_batch_begin(",
        "self.train_function(", "callbacks.on_train_batch_end(",
    )  # fmt: skip
    places = [source.index(one) for one in order]
    assert places == sorted(places), places


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    globals()[sys.argv[1]]()
