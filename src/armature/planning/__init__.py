"""What a run will need: memory, seconds and the layouts that fit, by closed formulas, torch-free.

The simulation of single ranks is in `simulation/`.
"""
