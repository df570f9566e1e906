"""What compressing the KV cache costs a model and what it buys, measured part by part."""
