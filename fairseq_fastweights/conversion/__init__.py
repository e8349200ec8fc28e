"""Converts models and tokenizers between fairseq and Hugging Face.

An input that is missing, damaged or not supported raises an `InvalidInput`, which is a `ValueError`; its message names
the file, the weight or the setting, its value, and the values that are allowed.
"""
