"""Support for GGUF checkpoints, llama.cpp's format. `container` reads the file, `describe` maps its
metadata to a ``config.json``, `names` maps its tensors to those of safetensors files, `weights`
decodes them, `vocabulary` builds the tokenizer."""
