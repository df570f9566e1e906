"""Text on the router: template, tokenizer, incremental detokenizer, stop strings. No model here."""
