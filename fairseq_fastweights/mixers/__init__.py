"""What mixes the positions of a sequence: attention, fast weight memories, state spaces."""
