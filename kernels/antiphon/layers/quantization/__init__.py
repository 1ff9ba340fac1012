"""Storage layouts of quantized weights in checkpoints, one a module.

A layout is a `StorageLayout` (storage.py): the tensors with their shapes and dtypes, and the torch
function that dequantizes them. That function is the definition of the layout, and runs anywhere;
how weights are then stored in memory and multiplied is a `LinearMethod` (`layers.methods`).
"""
