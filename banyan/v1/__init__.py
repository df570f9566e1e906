"""Generated stubs of proto/banyan/v1; `make stubs` writes them again."""
