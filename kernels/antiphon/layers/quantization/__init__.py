"""How checkpoints store the weights of linears in fewer bits: a file a layout.

A layout is a `StorageLayout` (storage.py): which tensors, of which shapes and dtypes, and the
torch function that makes numbers of them. That function is the definition of the layout, and runs
anywhere; how the numbers are then kept and multiplied is a `LinearMethod` (`layers.methods`).
"""
