"""How fast training is: the bare loop, ours, and what one would pick instead. `python -m benchmarks` measures them."""
