"""What checks cost: see README.md in this folder."""
