"""Groups that fetch blocks of KV cache from each other."""
