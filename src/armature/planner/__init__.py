"""What a run will need, by closed formulas and without torch: memory, seconds, and the layouts that
fit.
"""
