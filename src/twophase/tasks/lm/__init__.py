"""A small Llama on text: model, loss, corpus, evaluation, export."""
