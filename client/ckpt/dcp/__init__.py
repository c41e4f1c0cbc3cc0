"""torch.distributed.checkpoint (DCP) on ckpt stores: its save, async_save and load write and read ckpt checkpoints.

    from ckpt.dcp import StorageReader, StorageWriter

    writer = StorageWriter("s3://bucket/ckpts", run="gpt-small")
    dcp.save({"model": model.state_dict()}, storage_writer=writer, checkpoint_id="1000")
    dcp.load({"model": state}, storage_reader=StorageReader("s3://bucket/ckpts", run="gpt-small"))

DCP's model.blocks.0.weight has the path ("model", "blocks.0.weight"). It is stored as the entry model/blocks.0.weight
in the tree of the item `model`, as if `Checkpointer` had saved it, so `Checkpointer` restores and loads models that DCP
saved. Conversely, DCP loads models and optimizers that `Checkpointer` saved, under the names of model.state_dict() and
get_optimizer_state_dict(..., flatten_optimizer_state_dict=True). `Checkpointer` cannot restore optimizers saved under
DCP's names, and DCP cannot load the state that `Checkpointer` saves per rank.
"""

from ckpt.dcp.storage import StorageReader, StorageWriter

__all__ = ["StorageReader", "StorageWriter"]
