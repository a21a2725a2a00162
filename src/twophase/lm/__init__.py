"""The language-model recipe's own parts: model, text, training loop."""
