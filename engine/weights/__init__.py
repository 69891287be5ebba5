"""Model files: found or fetched, distrusted, converted once into one layout, and memory-mapped from then on.

`convert.prepare` is the door. The layout is a plain Hugging Face folder (`checkpoint.py`); nothing here computes with the weights.
"""
