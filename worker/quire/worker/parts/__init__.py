"""What an engine does beyond continuous batching and prefix caching, a folder or file each."""
