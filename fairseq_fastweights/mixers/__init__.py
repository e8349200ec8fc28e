"""Mixers, the parts of a layer that mix positions: attention, fast weight memories, state spaces."""
