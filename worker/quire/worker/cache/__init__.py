"""The KV cache as blocks: which are free, held or cached, and which is evicted next."""
