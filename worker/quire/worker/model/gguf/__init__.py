"""GGUF files, the format of llama.cpp, as one more kind of checkpoint: `container` reads the file,
`describe` gives its metadata the names of a ``config.json``, `names` its tensors those of
safetensors files, `weights` decodes them, `vocabulary` builds the tokenizer."""
