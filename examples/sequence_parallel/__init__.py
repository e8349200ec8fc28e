"""Fast weight rules over several processes, a segment of the text in each."""
