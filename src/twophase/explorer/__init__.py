"""Make the interactive page: an HTML file that shows what the theory says while a hand moves the hyperparameters."""
