"""Model files: found or fetched, distrusted, converted once into one layout, packed once for the CPU kernels.

`convert.prepare` is the door, and `packed.prepare_packed` the one behind it. Nothing here computes with the weights.
"""
