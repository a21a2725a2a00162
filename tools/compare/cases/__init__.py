"""The cases, a module for each part of the package; importing one adds its cases to `suite.CASES`."""

MODULES = ("engine", "optimizer", "theory", "runs")
