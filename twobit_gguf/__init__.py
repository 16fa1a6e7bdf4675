"""twobit: a model split by bits. The 2-bit base drafts, base + residual verifies; see README.md."""
