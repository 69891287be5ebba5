"""Performance, measured over the public protocols. Nothing here is a test.

Timings are printed as ratios of runs taken in turn, with their spread.
"""
