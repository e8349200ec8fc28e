"""The synthetic experiments of Schlag et al. (2021), Sec. 6.1: `run.py`, and `make demo-synthetic`."""
