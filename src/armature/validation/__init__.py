"""Everything that can be checked before a process starts, reported together. Imports no torch."""
