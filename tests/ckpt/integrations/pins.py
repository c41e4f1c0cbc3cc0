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
    assert callable(ModelCheckpoint._find_last_checkpoints)
    assert trainer.fit_loop._data_fetcher is None
    assert trainer.fit_loop.state_dict()["state_dict"] == {}  # holds `combined_loader` with the positions of loaders
    assert callback_connector._CallbackConnector._reorder_callbacks([first := ModelCheckpoint()]) == [first]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    globals()[sys.argv[1]]()
