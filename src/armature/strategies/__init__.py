"""How a model is distributed over processes. `configs/strategy/` names these classes."""
