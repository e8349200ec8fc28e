"""Layers: nn.Modules for fairseq models."""
