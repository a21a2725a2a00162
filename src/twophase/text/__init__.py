"""Token shards: text becomes files of token ids once, and every run reads them through memory maps (no torch here)."""
