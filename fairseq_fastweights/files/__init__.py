"""Files that are read without running them, and checked: checkpoints, weights and text."""
