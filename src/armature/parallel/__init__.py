"""Everything that knows process groups and meshes. Models, tasks, data and callbacks never import it; strategies do."""
