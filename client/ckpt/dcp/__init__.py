"""torch.distributed.checkpoint (DCP) on our stores: its save, async_save and load write and read our checkpoints.

    from ckpt.dcp import StorageReader, StorageWriter

    writer = StorageWriter("s3://bucket/ckpts", run="gpt-small")
    dcp.save({"model": model.state_dict()}, storage_writer=writer, checkpoint_id="1000")
    dcp.load({"model": state}, storage_reader=StorageReader("s3://bucket/ckpts", run="gpt-small"))

What DCP calls model.blocks.0.weight lies under ("model", "blocks.0.weight"): it is the entry model/blocks.0.weight
and has its place in the tree of the item `model`, as if `Checkpointer` had saved it. So either side loads the models
of the other (`Checkpointer.restore(model)`, `Checkpointer.load`), and DCP finds the optimizer state that
`Checkpointer` saved as optim.state.<parameter>.<key>, the names that get_optimizer_state_dict(...,
flatten_optimizer_state_dict=True) gives to tensors. `Checkpointer` does not restore an optimizer from DCP's names, and
the state that it keeps per rank is not seen here.
"""

from ckpt.dcp.reader import StorageReader
from ckpt.dcp.writer import StorageWriter

__all__ = ["StorageReader", "StorageWriter"]
