"""The operations inside other libraries' models; nothing here needs fairseq."""
