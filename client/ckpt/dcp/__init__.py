"""torch.distributed.checkpoint (DCP) on our stores: its save, async_save and load write and read our checkpoints.

    from ckpt.dcp import StorageReader, StorageWriter

    writer = StorageWriter("s3://bucket/ckpts", run="gpt-small")
    dcp.save({"model": model.state_dict()}, storage_writer=writer, checkpoint_id="1000")
    dcp.load({"model": state}, storage_reader=StorageReader("s3://bucket/ckpts", run="gpt-small"))

What DCP calls model.blocks.0.weight lies under ("model", "blocks.0.weight"): it is the entry model/blocks.0.weight
and has its place in the tree of the item `model`, as if `Checkpointer` had saved it. So `Checkpointer` restores and
loads models that DCP saved. The other way round, DCP finds models and optimizers that `Checkpointer` saved, under the
names of model.state_dict() and get_optimizer_state_dict(..., flatten_optimizer_state_dict=True). `Checkpointer` does
not restore optimizers from DCP's names, and DCP does not see the state that `Checkpointer` keeps per rank.
"""

from ckpt.dcp.reader import StorageReader
from ckpt.dcp.writer import StorageWriter

__all__ = ["StorageReader", "StorageWriter"]
