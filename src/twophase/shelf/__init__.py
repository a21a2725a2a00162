"""Outer methods as values: the rules, filters, schedules and readouts that an outer optimizer is made of."""
