"""Data sets that read a corpus as one long text."""
