"""LightningModules: what is learned, whatever the layout."""
