"""The objects in the store: documents, trees of plain data, boxes of tensors, shards, chunks and codecs. No I/O."""
