"""The operations in models of other libraries, without fairseq."""
