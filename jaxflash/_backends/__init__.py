"""One module per way of running attention; each says what it supports and runs it."""
