"""How fast training is: the bare loop, ours, and what one would pick instead. `scripts/benchmark.py` runs them."""
