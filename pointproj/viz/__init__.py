"""Plots, renderings and the page of an evaluation."""
