"""How the bytes of tensors are encoded: element types, codecs and casts. Pure."""
